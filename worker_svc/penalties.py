"""Changes to a sequence's logits before sampling: bias, penalties, suppressed tokens, bad words and filters.

Only the logits of the affected tokens are touched, so the cost depends on the request, not on the vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.bad_words import bad_words_of
from worker_svc.int_list import IntList
from worker_svc.logit_filter import to_device
from worker_svc.logit_filters import FILTERS, filters_of
from worker_svc.step import SamplingParams

_LARGEST = 1e30


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated, updated as tokens are sampled."""

    def __init__(self, prompt: NDArray[np.int32], generated: NDArray[np.int32]) -> None:
        ids = np.unique(np.concatenate([prompt, generated]))
        counts = np.zeros(len(ids), np.int32)
        np.add.at(counts, np.searchsorted(ids, generated), 1)
        self._ids = IntList(ids)
        self._counts = IntList(counts)
        self._place = {token: place for place, token in enumerate(ids.tolist())}

    def copy(self) -> Self:
        """An independent copy."""
        copied = copy(self)
        copied._ids, copied._counts, copied._place = IntList(self.ids), IntList(self.counts), self._place.copy()
        return copied

    def add(self, token: int) -> None:
        """Counts one more generated token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(1)
        else:
            self._counts.values[place] += 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """The distinct tokens."""
        return self._ids.values

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of `ids` was generated; 0 for a token of the prompt only."""
        return self._counts.values


class Adjustments:
    """One sequence's changes to its logits, and the token counts that they need."""

    def __init__(self, params: SamplingParams, tokens: NDArray[np.int32], prompt_length: int) -> None:
        self.params = params
        self.bias_ids = np.array(list(params.logit_bias), np.int32)
        self.bias_values = np.array(list(params.logit_bias.values()), np.float32)
        self._suppressed_ids = np.array(params.suppressed_token_ids, np.int32)
        self._bad_words = bad_words_of(params.bad_words) if params.bad_words else None
        # The output tokens that bad words may begin with
        self._output: tuple[int, ...] = tuple(tokens[prompt_length:].tolist()) if params.bad_words else ()
        self.filters = filters_of(params)
        self.num_tokens_until_min = params.min_tokens - (len(tokens) - prompt_length)
        self.counts: TokenCounts | None = None
        repeats = params.repetition_penalty != 1.0
        if repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            # Only the repetition penalty uses the prompt.
            prompt = tokens[: prompt_length if repeats else 0]
            self.counts = TokenCounts(prompt, tokens[prompt_length:])

    def copy(self) -> Self:
        """An independent copy."""
        copied = copy(self)
        copied.counts = None if self.counts is None else self.counts.copy()
        return copied

    def add(self, token: int) -> None:
        """Adds a sampled token."""
        self.num_tokens_until_min -= 1
        if self.counts is not None:
            self.counts.add(token)
        if self._bad_words is not None:
            output = (*self._output, token)
            self._output = output[max(0, len(output) - self._bad_words.num_needed) :]

    @property
    def suppressed_ids(self) -> NDArray[np.int32]:
        """The tokens that are suppressed now."""
        before_min = self._suppressed_ids if self.num_tokens_until_min > 0 else self._suppressed_ids[:0]
        if self._bad_words is None:
            return before_min
        completing = self._bad_words.completing(self._output)
        return np.concatenate([before_min, completing.astype(np.int32)])

    @property
    def changes_logits(self) -> bool:
        """Whether the next token is sampled from other logits than the model's."""
        return (
            self.counts is not None
            or len(self.bias_ids) > 0
            or len(self.filters) > 0
            or self._bad_words is not None
            or (self.num_tokens_until_min > 0 and len(self._suppressed_ids) > 0)
        )


@dataclass(slots=True)
class _PenaltyEntries:
    """Indices into the flattened logits [rows, vocab] of the batch, and a value for each."""

    places: list[NDArray[np.int64]]
    values: list[NDArray[np.float32]]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        places, values = np.concatenate(self.places), np.concatenate(self.values)
        return torch.from_numpy(places).to(device), torch.from_numpy(values).to(device)


def adjust_logits(logits: Tensor, rows: Sequence[Adjustments]) -> None:
    """Changes float32 logits [rows, vocab] in place, each row by its own adjustments.

    The order is bias, repetition penalty, frequency and presence penalty, as in vLLM and transformers; then
    suppression, so that nothing restores a suppressed token. Masks of grammars and then filters follow.
    """
    flat = logits.view(-1)
    _add_bias(flat, logits.shape[1], rows)
    _penalize(flat, logits.shape[1], rows)
    suppressed = [
        row * logits.shape[1] + ids.astype(np.int64)
        for row, adjustments in enumerate(rows)
        if len(ids := adjustments.suppressed_ids)
    ]
    if suppressed:
        places = torch.from_numpy(np.concatenate(suppressed)).to(logits.device)
        flat.index_fill_(0, places, float("-inf"))


def filtered_rows(rows: Sequence[Adjustments]) -> list[tuple[int, SamplingParams]]:
    """The rows to which filters apply, for `filter_logits`."""
    return [(row, adjustments.params) for row, adjustments in enumerate(rows) if adjustments.filters]


def filter_logits(
    logits: Tensor,
    filtered: Sequence[tuple[int, SamplingParams]],
    suppressed: float = float("-inf"),
    *,
    one_by_one: bool = False,
) -> None:
    """Drops tokens of these rows of logits [rows, vocab] by the filters that apply to each, in place.

    `suppressed` is the logit of a dropped token. NaN stays NaN, so that sampling detects it. With `one_by_one` what is
    dropped of a row does not depend on the other rows to the last bit: torch's sums over a row depend on how many rows
    there are, except on one thread of a CPU.
    """
    for one in FILTERS if filtered else ():
        chosen = [(row, params) for row, params in filtered if one.applies(params)]
        for together in [[each] for each in chosen] if one_by_one else [chosen] * bool(chosen):
            rows = to_device([row for row, _ in together], torch.int64, logits.device)
            before = logits.index_select(0, rows)
            part = before.clone()
            one(part, [params for _, params in together])
            is_dropped = part.isneginf() & before.isfinite()
            logits.index_copy_(0, rows, before.masked_fill_(is_dropped, suppressed))


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
        # A factor near 0 would make infinities, whose differences are NaN.
        flat[where] = torch.where(values > 0, values / factor, values * factor).clamp_(-_LARGEST, _LARGEST)
    if terms.places:
        flat.index_add_(0, *terms.on(flat.device))
