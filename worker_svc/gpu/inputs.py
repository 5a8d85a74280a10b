"""The input of a forward pass on the device: a batch as tensors, and what launches need to know of it on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.batch import Batch


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A `worker_svc.batch.Batch` on the device.

    `token_ids` may hold -1 - row for the token that the last step sampled at that row. `logits_indices` is None if a
    token is sampled after every token. The first `num_single` sequences have one token each. `plan` holds the arrays of
    `DeviceAttention.plan`.
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
    plan: Sequence[Tensor]


def decodes_only(batch: Batch) -> bool:
    """Whether each sequence has one token, with a token sampled after it."""
    return batch.max_query_len == 1 and len(batch.logits_indices) == len(batch.context_lens)


def count_single(batch: Batch) -> int:
    """How many sequences of one token come before the first longer one."""
    if batch.max_query_len == 1:
        return len(batch.context_lens)
    return int(np.argmax(np.diff(batch.query_starts) > 1))


def empty_batch() -> Batch:
    """A batch of decodes without a sequence: a graph is captured with it."""
    ids, lengths = np.empty(0, np.int64), np.empty(0, np.int32)
    tables, starts = np.empty((0, 0), np.int32), np.zeros(1, np.int32)
    return Batch(ids, ids, ids, tables, starts, lengths, max_query_len=1, logits_indices=ids)


def token_arrays(batch: Batch) -> list[NDArray[Any]]:
    """The arrays per token, and the context lengths: for decodes, one row each."""
    return [batch.token_ids, batch.positions, batch.slots, batch.context_lens]


def layout_arrays(batch: Batch) -> list[NDArray[Any]]:
    """The arrays that lay out a batch of any kind."""
    return [batch.query_starts, batch.logits_indices, batch.block_tables]


def padded(values: NDArray[Any], length: int, fill: float) -> NDArray[Any]:
    """The values [n, at most length], padded with `fill`."""
    array = np.full(length, fill, values.dtype)
    array[: len(values)] = values
    return array


def forward_inputs(
    batch: Batch, tokens: Sequence[Tensor], layout: Sequence[Tensor], plan: Sequence[Tensor]
) -> ForwardInputs:
    """The inputs of any batch, from its `token_arrays`, `layout_arrays` and plan on the device."""
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
        plan,
    )
