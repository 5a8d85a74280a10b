"""The input of a forward pass on the device: a batch as tensors, and what launches need to know of it on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.decode_plan import DecodePlan, DecodeSplits
from worker_svc.batch import Batch


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A `worker_svc.batch.Batch` on the device.

    `token_ids` may hold -1 - row for the token that the last step sampled at that row. `logits_indices` is None if a
    token is sampled after every token. The first `num_single` sequences have one token each; `decode_plans` are theirs,
    by the window of layers, of each of the model's `decode_splits`; none if there is no such sequence.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    logits_indices: Tensor | None
    num_single: int
    max_query_len: int
    decode_plans: Mapping[int | None, DecodePlan]


def decodes_only(batch: Batch) -> bool:
    """Whether each sequence has one token, with a token sampled after it."""
    return batch.max_query_len == 1 and len(batch.logits_indices) == len(batch.context_lens)


def count_single(batch: Batch) -> int:
    """How many sequences of one token come before the first longer one."""
    if batch.max_query_len == 1:
        return len(batch.context_lens)
    return int(np.argmax(np.diff(batch.query_starts) > 1))


def token_arrays(batch: Batch) -> list[NDArray[Any]]:
    """The arrays per token, and the context lengths: for decodes, one row each."""
    return [batch.token_ids, batch.positions, batch.slots, batch.context_lens]


def layout_arrays(batch: Batch) -> list[NDArray[Any]]:
    """The arrays that lay out a batch of any kind."""
    return [batch.query_starts, batch.logits_indices, batch.block_tables]


def plan_arrays(context_lens: NDArray[np.int32], splits: Sequence[DecodeSplits]) -> list[NDArray[Any]]:
    """The plans of sequences of one token, one after the other; none without sequences."""
    return [array for split in splits for array in split.plan(context_lens)] if len(context_lens) else []


def decode_plans(arrays: Sequence[Tensor], splits: Sequence[DecodeSplits]) -> dict[int | None, DecodePlan]:
    """The plans by window, from their `plan_arrays` on the device."""
    plans = zip(splits, arrays[0::3], arrays[1::3], arrays[2::3], strict=bool(arrays))
    return {split.window: DecodePlan(split, *tensors) for split, *tensors in plans}


def padded(values: NDArray[Any], length: int, fill: float) -> NDArray[Any]:
    """The values [n, at most length], padded with `fill`."""
    array = np.full(length, fill, values.dtype)
    array[: len(values)] = values
    return array


def forward_inputs(
    batch: Batch, tokens: Sequence[Tensor], layout: Sequence[Tensor], plans: Mapping[int | None, DecodePlan]
) -> ForwardInputs:
    """The inputs of any batch, from its `token_arrays`, `layout_arrays` and plans on the device."""
    token_ids, positions, slots, context_lens = tokens
    query_starts, logits_indices, block_tables = layout
    return ForwardInputs(
        token_ids,
        positions,
        slots,
        block_tables,
        query_starts,
        context_lens,
        None if decodes_only(batch) else logits_indices,
        count_single(batch),
        batch.max_query_len,
        plans,
    )
