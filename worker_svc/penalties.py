"""What changes a sequence's logits before it draws: bias, penalties and tokens that may not come yet.

Only the logits of the tokens concerned are touched, so the cost follows what a request asks for, not the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.int_list import IntList
from worker_svc.step import SamplingParams

_LARGEST = 1e30


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated, kept as tokens are drawn."""

    def __init__(self, prompt: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        ids = np.unique(np.concatenate([prompt, generated]))
        counts = np.zeros(len(ids), np.int32)
        np.add.at(counts, np.searchsorted(ids, generated), 1)
        self._ids = IntList(ids)
        self._counts = IntList(counts)
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def add(self, token: int) -> None:
        """Count one more generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(1)
        else:
            self._counts.values[place] += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens, each once."""
        return self._ids.values

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of `ids` was generated; 0 for one of the prompt alone."""
        return self._counts.values


class Adjustments:
    """One sequence's changes to its logits, and what they need to know of its tokens."""

    def __init__(self, params: SamplingParams, tokens: NDArray[np.int32], prompt_length: int) -> None:
        self.params = params
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float32)
        self.suppressed_ids = np.array(params.suppressed_token_ids, np.int32)
        self.num_tokens_until_min = params.min_tokens - (len(tokens) - prompt_length)
        self.counts: TokenCounts | None = None
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            # Only repetition looks at the prompt.
            prompt = tokens[: prompt_length if repeats else 0]
            self.counts = TokenCounts(prompt, tokens[prompt_length:])

    def add(self, token: int) -> None:
        """A token was drawn."""
        self.num_tokens_until_min -= 1
        if self.counts is not None:
            self.counts.add(token)

    @property
    def suppresses(self) -> bool:
        """Whether some tokens may not be drawn now."""
        return self.num_tokens_until_min > 0 and len(self.suppressed_ids) > 0

    @property
    def changes_logits(self) -> bool:
        """Whether the next draw sees other logits than the model's."""
        return self.counts is not None or len(self.bias_ids) > 0 or self.suppresses


@dataclass(slots=True)
class _PenaltyEntries:
    """Logits of the batch, by their place in the flattened [rows, vocab], and a value for each."""

    places: list[NDArray[np.int64]]
    values: list[NDArray[np.float32]]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        places, values = np.concatenate(self.places), np.concatenate(self.values)
        return torch.from_numpy(places).to(device), torch.from_numpy(values).to(device)


def adjust_logits(logits: Tensor, rows: Sequence[Adjustments]) -> None:
    """Change float32 logits [rows, vocab] in place, each row by its own adjustments.

    Bias first, then the repetition penalty, then frequency and presence, as vLLM and transformers order them;
    suppression last, so that nothing brings a suppressed token back.
    """
    flat = logits.view(-1)
    _add_bias(flat, logits.shape[1], rows)
    _penalize(flat, logits.shape[1], rows)
    suppressed = [
        row * logits.shape[1] + adjustments.suppressed_ids.astype(np.int64)
        for row, adjustments in enumerate(rows)
        if adjustments.suppresses
    ]
    if suppressed:
        places = torch.from_numpy(np.concatenate(suppressed)).to(logits.device)
        flat.index_fill_(0, places, float("-inf"))


def _add_bias(flat: Tensor, vocab_size: int, rows: Sequence[Adjustments]) -> None:
    entries = _PenaltyEntries([], [])
    for row, adjustments in enumerate(rows):
        if len(adjustments.bias_ids):
            entries.places.append(row * vocab_size + adjustments.bias_ids.astype(np.int64))
            entries.values.append(adjustments.bias_values)
    if entries.places:
        flat.index_add_(0, *entries.on(flat.device))


def _penalize(flat: Tensor, vocab_size: int, rows: Sequence[Adjustments]) -> None:
    factors, terms = _PenaltyEntries([], []), _PenaltyEntries([], [])
    for row, adjustments in enumerate(rows):
        seen, params = adjustments.counts, adjustments.params
        if seen is None or not len(seen.ids):
            continue
        places = row * vocab_size + seen.ids.astype(np.int64)
        if params.repetition_penalty != 1.0:
            factors.places.append(places)
            factors.values.append(np.full(len(places), params.repetition_penalty, np.float32))
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            term = params.frequency_penalty * seen.counts + params.presence_penalty * (seen.counts > 0)
            terms.places.append(places)
            terms.values.append(-term.astype(np.float32))
    if factors.places:
        where, factor = factors.on(flat.device)
        values = flat[where]
        # A factor near 0 would make infinities, whose differences are no numbers.
        flat[where] = torch.where(values > 0, values / factor, values * factor).clamp_(-_LARGEST, _LARGEST)
    if terms.places:
        flat.index_add_(0, *terms.on(flat.device))
