"""Attention over the paged KV cache, by Triton kernels or by torch on the processor.

A backend lays out a step once (`plan`); what it returns stores and attends in each layer.
"""

from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.cpu_attention import cpu_paged_attention, cpu_store_kv, plan_cpu_attention
from worker_svc.batch import Batch


class AttentionKind(StrEnum):
    """Which kernels."""

    TRITON = "triton"
    TORCH = "torch"


class StepAttention(Protocol):
    """Attention of one step."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the keys and values [num_tokens, num_kv_heads, head_dim] of the step's tokens in their slots.

        Returns what each query [num_tokens, num_heads, head_dim] gathers from its sequence's context: a tensor of the
        shape of `query`.
        """


class AttentionBackend(Protocol):
    """Attention over one cache."""

    def plan(self, batch: Batch) -> StepAttention:
        """Attention of this batch."""


def make_attention(kind: AttentionKind, cache: Tensor, scale: float) -> AttentionBackend:
    """A backend over a cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
    match kind:
        case AttentionKind.TRITON:
            return TritonAttention(cache, scale)
        case AttentionKind.TORCH:
            return TorchAttention(cache, scale)


class TritonAttention:
    """The Triton kernels; on CPU tensors through Triton's interpreter (TRITON_INTERPRET=1), which is for tests."""

    def __init__(self, cache: Tensor, scale: float) -> None:
        from quire_kernels.paged_attention import paged_attention
        from quire_kernels.store_kv import store_kv

        self._attend, self._store = paged_attention, store_kv
        self._layers, self._device, self._scale = _layers(cache), cache.device, scale

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots).to(self._device)
        block_tables = torch.from_numpy(batch.block_tables).to(self._device)
        query_starts = torch.from_numpy(batch.query_starts).to(self._device)
        context_lens = torch.from_numpy(batch.context_lens).to(self._device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            self._store(key, value, keys, values, slots)
            return self._attend(
                query, keys, values, block_tables, query_starts, context_lens, batch.max_query_len, self._scale
            )

        return attend


class TorchAttention:
    """torch on the processor, without a loop over sequences."""

    def __init__(self, cache: Tensor, scale: float) -> None:
        self._layers, self._block_size, self._scale = _layers(cache), cache.shape[4], scale

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots)
        plan = plan_cpu_attention(batch.block_tables, batch.query_starts, batch.context_lens, self._block_size)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._layers[layer]
            cpu_store_kv(key, value, keys, values, slots)
            return cpu_paged_attention(query, keys, values, plan, self._scale)

        return attend


def _layers(cache: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of each layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim]."""
    return [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(cache.shape[1])]
