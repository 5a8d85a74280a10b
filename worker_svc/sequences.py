"""What a worker knows of each sequence, kept between steps and updated by deltas."""

from collections.abc import Sequence as Items
from itertools import chain
from typing import TYPE_CHECKING, Self

import numpy as np

from worker_svc.bad_words import bad_words_of
from worker_svc.description import WorkerLimits
from worker_svc.int_list import IntList
from worker_svc.logit_filters import filters_of
from worker_svc.sampler import MIN_TEMPERATURE, SamplingState
from worker_svc.step import DECODER_RESULTS, BlockTableUpdate, NewSequence, ScheduledSequence

if TYPE_CHECKING:  # they import llguidance, which sequences without grammars do not need
    from worker_svc.grammar import GrammarCompiler
    from worker_svc.grammar_matcher import GrammarMatcher


class InvalidSequence(Exception):  # noqa: N818
    """A sequence that cannot be added or run as requested. The text is for the operator and holds no tokens."""


class Sequence:
    """A sequence: its known tokens, how many are computed, and the blocks of their keys and values.

    The last tokens may be *promised*: sampled by a launched step, with values that are not known here yet. A
    placeholder stands for each. Tokens of a step with drafts are not promised, because their number is not known.
    """

    __slots__ = (
        "__weakref__",
        "_sampling",
        "assumed_start",
        "bad_words",
        "blocks",
        "failure",
        "has_filters",
        "index",
        "matcher",
        "num_cached_tokens",
        "num_computed",
        "num_top_of_prompt",
        "params",
        "prompt_length",
        "takes_argmax",
        "tokens",
    )

    def __init__(self, new: NewSequence, grammars: "GrammarCompiler | None" = None) -> None:
        self.tokens = IntList(new.token_ids)
        self.prompt_length = new.prompt_length
        self.params, self.index = new.sampling, new.index
        self.has_filters = bool(filters_of(new.sampling))
        # None: no log-probabilities of the prompt are asked for.
        self.num_top_of_prompt = new.num_top_of_prompt if new.result == "prompt_logprobs" else None
        self.bad_words = bad_words_of(new.sampling.bad_words) if new.sampling.bad_words else None
        # Whether each token is the argmax of the model's logits, but for bias and tokens that min_tokens suppresses
        self.takes_argmax = (
            new.sampling.temperature < MIN_TEMPERATURE
            and not new.sampling.has_penalties
            and not new.sampling.grammar
            and not self.has_filters
            and self.bad_words is None
        )
        # Set by its first step, since a prefix may be in the cache already.
        self.num_computed: int | None = None
        # The same under the scheduler's assumption that the last step returned one token.
        self.assumed_start: int | None = None
        # Keys and values of tokens before this one are in shared blocks and never written.
        self.num_cached_tokens = 0
        self.blocks = IntList()
        self._sampling: SamplingState | None = None
        self.matcher: GrammarMatcher | None = None
        if grammars is not None and new.sampling.grammar:
            self.matcher = grammars.matcher(new.sampling.grammar, new.token_ids[new.prompt_length :])
        # Why a promised token is missing. What was launched for the sequence since then is discarded.
        self.failure: str | None = None

    @classmethod
    def from_new_sequence(
        cls, new: NewSequence, limits: WorkerLimits, grammars: "GrammarCompiler | None" = None
    ) -> Self:
        """Raises InvalidSequence if `new` is malformed or asks for a result that is not computed here.

        Its grammar begins to be compiled. Without `grammars` none is accepted.
        """
        if new.result not in DECODER_RESULTS:
            raise InvalidSequence(f"this worker does not compute {new.result}")
        if not 1 <= new.prompt_length <= len(new.token_ids):
            raise InvalidSequence(f"a prompt of {new.prompt_length} tokens in a sequence of {len(new.token_ids)}")
        if len(new.token_ids) > limits.context_length:
            raise InvalidSequence(f"{len(new.token_ids)} tokens exceed the context of {limits.context_length}")
        sampling = new.sampling
        named = (
            new.token_ids,
            list(sampling.logit_bias),
            sampling.suppressed_token_ids,
            sampling.allowed_token_ids,
            sampling.logprob_token_ids,
            list(chain.from_iterable(sampling.bad_words)),
        )
        if not all(_within(ids, limits.vocab_size) for ids in named):
            raise InvalidSequence(f"a token id beyond the vocabulary of {limits.vocab_size}")
        if new.sampling.grammar and grammars is None:
            raise InvalidSequence("this worker applies no grammars")
        return cls(new, grammars)

    def validate(self, scheduled: ScheduledSequence, limits: WorkerLimits) -> tuple[int, bool]:
        """The position of the first token to compute, and whether the last known token is reached, so that the next one
        is sampled.

        Raises InvalidSequence unless the schedule continues what is known.
        """
        start, known, new_block_ids = scheduled.start, len(self.tokens), scheduled.new_block_ids
        if self.num_computed is not None:
            if start != self.num_computed and start != self.assumed_start:
                raise InvalidSequence(f"scheduled from {start}, but {self.num_computed} are computed")
            start = self.num_computed
        end, extra = start + scheduled.num_tokens, scheduled.max_extra_tokens
        if end <= start or end > known:
            raise InvalidSequence(f"tokens {start} to {end - 1} scheduled, but {known} are known")
        if new_block_ids and not _within(new_block_ids, limits.num_blocks):
            raise InvalidSequence(f"a block id beyond the {limits.num_blocks} blocks")
        held = (len(self.blocks) + len(new_block_ids)) * limits.block_size
        if end + extra > held:
            raise InvalidSequence(f"scheduled up to {end + extra}, but its blocks hold {held}")
        if extra and extra > limits.max_draft_tokens:
            raise InvalidSequence(f"{extra} extra tokens, but at most {limits.max_draft_tokens} are drafted")
        if end == known >= limits.context_length - extra:
            raise InvalidSequence(f"a token sampled beyond the context of {limits.context_length}")
        return start, end == known

    def update(self, update: BlockTableUpdate, limits: WorkerLimits) -> None:
        """Replaces one block of the table. Raises InvalidSequence if the index does not exist."""
        if update.index >= len(self.blocks):
            raise InvalidSequence(
                f"block-table update of index {update.index}, but the table has {len(self.blocks)} blocks"
            )
        if not _within([update.block_id], limits.num_blocks):
            raise InvalidSequence(f"a block id beyond the {limits.num_blocks} blocks")
        self.blocks.values[update.index] = update.block_id

    def append_placeholder(self, placeholder_token: int) -> None:
        """Adds a token that is being sampled."""
        self.tokens.append(placeholder_token)

    def fill_placeholder(self, position: int, token: int) -> None:
        """Sets the promised token of this position."""
        self.tokens[position] = token

    def extend(self, tokens: Items[int]) -> None:
        """Adds the tokens of a step that promised nothing and computed all but the last of them."""
        self.tokens.extend(tokens)
        self.num_computed = len(self.tokens) - 1

    def prepare_mask(self) -> bool:
        """Begins to make a mask that takes long. Returns whether a step that samples for it need not wait for its mask.

        True without a grammar.
        """
        matcher = self.matcher
        if matcher is None or not matcher.is_slow:
            return matcher is None or matcher.is_compiled
        known = self.tokens.values[self.prompt_length + matcher.num_tokens :].tolist()
        if self.tokens.values[-1] < 0:
            return False  # promised: a step uses the matcher
        for token in known:
            matcher.add(token)
        return matcher.prepare()

    @property
    def sampling(self) -> SamplingState:
        """The state for sampling on the host, from the tokens known at the first access; the sampler updates it."""
        if self._sampling is None:
            self._sampling = SamplingState(
                self.params, self.index, self.tokens.values, self.prompt_length, self.matcher
            )
        return self._sampling


def _within(values: Items[int], end: int) -> bool:
    if not values:
        return True
    array = np.asarray(values, np.int64)
    return bool(array.min() >= 0 and array.max() < end)
