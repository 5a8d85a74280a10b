"""Masks of a step on a device: matchers follow the tokens that the step before sampled."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from worker_svc.out_of_memory import Drafts
from worker_svc.sequences import Sequence
from worker_svc.token_masks import TokenMasks

if TYPE_CHECKING:  # it imports llguidance, which sequences without grammars do not need
    from worker_svc.grammar_matcher import GrammarMatcher


class SampledTokens(Protocol):
    """The tokens of a launched step."""

    def tokens(self) -> list[int]:
        """The token of each row, -1 for a row without one; waits for them."""


class SequenceMatchers:
    """Keeps the matchers of sequences at their last token, which may be a placeholder of the step before."""

    def __init__(self) -> None:
        self._step_before: SampledTokens | None = None

    def launched(self, step: SampledTokens) -> None:
        """Placeholders of the next step are rows of this one."""
        self._step_before = step

    def masks(self, sequences: Items[Sequence], drafts: Drafts = ()) -> TokenMasks:
        """The masks of a step's rows, of which at least one has a grammar; the rows of a draft follow their sequence's.

        Waits for the step before if a sequence's last token is a placeholder. Raises the error of the device.
        """
        matchers: list[tuple[int, GrammarMatcher]] = []
        row = 0
        for sequence, draft in zip(sequences, drafts or [()] * len(sequences), strict=True):
            matcher = sequence.matcher
            if matcher is not None:
                self._catch_up(matcher, sequence)
                matchers.append((row, matcher))
                for place, token in enumerate(draft, start=1):
                    matcher = matcher.copy()
                    matcher.add(token)
                    matchers.append((row + place, matcher))
            row += 1 + len(draft)
        return matchers[0][1].compiler.start_masks(matchers).result()

    def _catch_up(self, matcher: "GrammarMatcher", sequence: Sequence) -> None:
        """Adds the output tokens that the matcher does not have yet."""
        for token in sequence.tokens.values[sequence.prompt_length + matcher.num_tokens :].tolist():
            known = token
            if token < 0 and self._step_before is not None:
                known = self._step_before.tokens()[-1 - token]
            if known >= 0:  # otherwise the sequence fails
                matcher.add(known)
