"""Sampling on the device: its inputs for each row, in columns, and the operations."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from quire_kernels.adjust_logits import SUPPRESSED, LogitEntries, Penalties, adjust_logits
from quire_kernels.mask_logits import mask_logits
from quire_kernels.sample import SamplingTensors, sample
from worker_svc.bad_words import NOT_NEEDED
from worker_svc.gpu.inputs import padded
from worker_svc.out_of_memory import Drafts
from worker_svc.penalties import filter_logits
from worker_svc.sequences import Sequence
from worker_svc.step import SamplingParams

_INT32_MAX = 2**31 - 1

Arrays = list[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each row samples."""

    sampling: SamplingTensors
    penalties: Penalties
    entries: LogitEntries


def sampling_columns(
    sequences: Items[Sequence], positions: Items[int], penalty_slots: NDArray[np.int64], num_rows: int
) -> Arrays:
    """The columns of `SamplingTensors` and of `Penalties` without token counts, for rows that are about to sample.

    A row samples the token of its sequence at its position. Padding rows take the argmax of whatever logits they have.
    """
    params = [sequence.params for sequence in sequences]

    def column(dtype: DTypeLike, fill: float, values: ArrayLike) -> NDArray[Any]:
        return padded(np.array(values, dtype), num_rows, fill)

    return [
        column(np.float32, 0.0, [p.temperature for p in params]),
        column(np.int32, 0, [min(p.top_k, _INT32_MAX) for p in params]),
        column(np.float64, 1.0, [p.top_p for p in params]),
        column(np.float32, 0.0, [p.min_p for p in params]),
        column(np.uint64, 0, [p.seed % 2**64 for p in params]).view(np.int64),
        column(np.int32, 0, [sequence.index for sequence in sequences]),
        column(np.int32, 0, positions),
        column(np.int64, -1, penalty_slots),
        column(np.float32, 1.0, [p.repetition_penalty for p in params]),
        column(np.float32, 0.0, [p.frequency_penalty for p in params]),
        column(np.float32, 0.0, [p.presence_penalty for p in params]),
    ]


def sampling_inputs(columns: Items[Tensor], entries: Items[Tensor], token_counts: Tensor) -> SamplingInputs:
    """Inputs from `sampling_columns` and `LogitEntryLists.of`, on the device."""
    temperature, top_k, top_p, min_p, seeds, indices, positions, slots, repetition, frequency, presence = columns
    return SamplingInputs(
        SamplingTensors(temperature, top_k, top_p, min_p, seeds, indices, positions),
        Penalties(slots, repetition, frequency, presence, token_counts),
        LogitEntries(*entries),
    )


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """`worker_svc.token_masks.TokenMasks` on the device."""

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class DeviceBadWords:
    """Tokens that complete a bad word: int64 each, the row and the token.

    A `source` that is not negative is the row of the last step that sampled the last token before it: the word is only
    completed if that is `last_token`.
    """

    rows: Tensor
    tokens: Tensor
    sources: Tensor
    last_tokens: Tensor


@dataclass(frozen=True, slots=True)
class BadWordColumns:
    """The columns of `DeviceBadWords` on the host."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    last_tokens: NDArray[np.int64]

    def on_device(self, upload: Callable[[NDArray[Any]], Tensor]) -> DeviceBadWords:
        columns = (self.rows, self.tokens, self.sources, self.last_tokens)
        return DeviceBadWords(*(upload(np.ascontiguousarray(column)) for column in columns))


def adjust_and_sample(
    logits: Tensor,
    inputs: SamplingInputs,
    sampled: Tensor,
    filtered: Items[tuple[int, SamplingParams]] = (),
    bad_words: DeviceBadWords | None = None,
    masks: DeviceMasks | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """Samples a token for each row of float32 logits [rows, vocab_size], which it changes, into the first rows of
    `sampled`, which holds the tokens that the last step sampled.

    A row without a token gets -1. Nothing here waits for the device, unless a logit filter of another package does.
    With `filtered` rows, from which logit filters drop tokens, masks or bad words it is not captured, because their
    number differs. With `deterministic` a row's token does not depend on the other rows, to the last bit.
    """
    adjust_logits(logits, inputs.entries, inputs.penalties)
    if bad_words is not None:
        _suppress(logits, bad_words, sampled)
    if masks is not None:
        mask_logits(logits, masks.rows, masks.bits)
    filter_logits(logits, filtered, SUPPRESSED.value, one_by_one=deterministic)
    sampled[: len(logits)].copy_(sample(logits, inputs.sampling, inputs.penalties))


def _suppress(logits: Tensor, words: DeviceBadWords, sampled: Tensor) -> None:
    """Suppresses tokens that complete a bad word."""
    flat = logits.view(-1)
    places = words.rows * logits.shape[1] + words.tokens
    completes = (words.sources < 0) | (sampled[words.sources.clamp(min=0)] == words.last_tokens)
    # NaN and infinity stay, for `sample` to find. Several words may end with the same token.
    changed = torch.where(completes & flat[places].isfinite(), SUPPRESSED.value, float("inf"))
    flat.scatter_reduce_(0, places, changed, "amin")


def bad_word_columns(sequences: Items[Sequence], drafts: Drafts = ()) -> BadWordColumns | None:
    """The tokens that would complete a bad word, of all rows; the rows of a draft follow their sequence's.

    None: no row has any.
    """
    found: list[NDArray[np.int64]] = []
    places: list[tuple[int, int, int]] = []  # how many tokens are found, their row, and the row of the last token
    row = 0
    for sequence, draft in zip(sequences, drafts or [()] * len(sequences), strict=True):
        words = sequence.bad_words
        if words is not None:
            first = max(sequence.prompt_length, len(sequence.tokens) - words.num_needed)
            output = [*sequence.tokens.values[first:].tolist(), *draft]
            for place in range(1 + len(draft)):
                end = len(output) - len(draft) + place
                found.append(words.candidates(output[:end]))
                places.append((len(found[-1]), row + place, -1 - output[end - 1] if end else -1))
        row += 1 + len(draft)
    counts, rows, sources = np.array(places, np.int64).reshape(-1, 3).T
    if not counts.any():
        return None
    tokens, last_tokens = np.concatenate(found).T
    is_needed = last_tokens != NOT_NEEDED
    return BadWordColumns(
        rows.repeat(counts),
        tokens,
        np.where(is_needed, sources.repeat(counts), -1),
        np.where(is_needed, last_tokens, 0),
    )


class LogitEntryLists:
    """The single logits that sequences change: bias, and suppressed tokens."""

    def __init__(self) -> None:
        self._entries_by_sequence: WeakKeyDictionary[Sequence, _SequenceEntries] = WeakKeyDictionary()

    def of(self, sequences: Items[Sequence], positions: Items[int]) -> Arrays:
        """The columns of `LogitEntries` for rows that are about to sample, each for its sequence at its position."""
        rows, tokens, values = [], [], []
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            if not sequence.params.logit_bias and sequence.params.min_tokens == 0:
                continue
            part = self._entries_of(sequence).at(position - sequence.prompt_length)
            rows.append(np.full(len(part.tokens), row, np.int32))
            tokens.append(part.tokens)
            values.append(part.values)
        if not rows:
            return [np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)]
        return [np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)]

    def _entries_of(self, sequence: Sequence) -> "_SequenceEntries":
        changes = self._entries_by_sequence.get(sequence)
        if changes is None:
            changes = self._entries_by_sequence[sequence] = _SequenceEntries(sequence.params)
        return changes


@dataclass(frozen=True, slots=True)
class _Entries:
    tokens: NDArray[np.int32]
    values: NDArray[np.float32]


class _SequenceEntries:
    """One sequence's entries, before and after its min_tokens. Each names a token once."""

    def __init__(self, params: SamplingParams) -> None:
        biased = np.array(list(params.logit_bias), np.int32)
        bias = np.array(list(params.logit_bias.values()), np.float32)
        suppressed = np.unique(np.array(params.suppressed_token_ids, np.int32))
        left = ~np.isin(biased, suppressed)
        forbidden = np.full(len(suppressed), -np.inf, np.float32)
        self._min_tokens = params.min_tokens
        self._later = _Entries(biased, bias)
        self._first = _Entries(np.concatenate([biased[left], suppressed]), np.concatenate([bias[left], forbidden]))

    def at(self, num_generated: int) -> _Entries:
        """The entries for the token after `num_generated` tokens."""
        return self._first if num_generated < self._min_tokens else self._later
