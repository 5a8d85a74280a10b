"""Attention over the paged KV cache, by Triton kernels, or on the processor by compiled ones or by torch.

A backend lays out a step once (`plan`); what it returns stores and attends in each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quire_kernels.cpu.attention import CacheLayer, attend, store, why_not_compiled
from quire_kernels.cpu.team import Team
from quire_kernels.cpu_attention import CpuAttentionPlan, cpu_paged_attention, cpu_store_kv, plan_cpu_attention
from worker_svc.batch import Batch


class AttentionKind(StrEnum):
    """Which kernels."""

    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """The compiled ones: the threads that run them, and whether weights are kept in 8 bits."""

    team: Team
    int8: bool


Kernels: TypeAlias = AttentionKind | CompiledKernels


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    Scores are multiplied by `scale`, then capped: s becomes c * tanh(s / c) for a `soft_cap` c. Of a `window` w a query
    sees the last w keys up to its own. None: no cap, all keys.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


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


def make_attention(kernels: Kernels, cache: Tensor, layers: Sequence[LayerAttention]) -> AttentionBackend:
    """A backend over a cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of these layers.

    Where the cache is of a shape that the compiled kernels do not take, torch stands in for them.
    """
    if len(layers) != cache.shape[1]:
        raise ValueError(f"layers: must be those of the cache, {cache.shape[1]}, not {len(layers)}")
    match kernels:
        case AttentionKind.TRITON:
            return TritonAttention(cache, layers)
        case CompiledKernels() if why_not_compiled(cache.shape[5], cache.shape[4], cache.dtype) is None:
            return CompiledAttention(cache, layers, kernels.team)
        case _:
            return TorchAttention(cache, layers)


class TritonAttention:
    """The Triton kernels; on CPU tensors through Triton's interpreter (TRITON_INTERPRET=1), which is for tests."""

    def __init__(self, cache: Tensor, layers: Sequence[LayerAttention]) -> None:
        from quire_kernels.paged_attention import paged_attention
        from quire_kernels.store_kv import store_kv

        self._attend, self._store = paged_attention, store_kv
        self._caches, self._layers, self._device = _caches(cache), layers, cache.device

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots).to(self._device)
        block_tables = torch.from_numpy(batch.block_tables).to(self._device)
        query_starts = torch.from_numpy(batch.query_starts).to(self._device)
        context_lens = torch.from_numpy(batch.context_lens).to(self._device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._caches[layer]
            how = self._layers[layer]
            self._store(key, value, keys, values, slots)
            return self._attend(
                query,
                keys,
                values,
                block_tables,
                query_starts,
                context_lens,
                batch.max_query_len,
                how.scale,
                window=how.window,
                soft_cap=how.soft_cap,
            )

        return attend


class TorchAttention:
    """torch on the processor, without a loop over sequences."""

    def __init__(self, cache: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._caches, self._layers, self._block_size = _caches(cache), layers, cache.shape[4]
        self._windows = {layer.window for layer in layers}

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots)
        plans = self._plan_windows(batch)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._caches[layer]
            how = self._layers[layer]
            cpu_store_kv(key, value, keys, values, slots)
            return cpu_paged_attention(query, keys, values, plans[how.window], how.scale, soft_cap=how.soft_cap)

        return attend

    def _plan_windows(self, batch: Batch) -> dict[int | None, CpuAttentionPlan]:
        longest = int(batch.context_lens.max())
        # A window that holds every context is none.
        bounds = {window: window if window is not None and window < longest else None for window in self._windows}
        plans = {
            bound: plan_cpu_attention(
                batch.block_tables, batch.query_starts, batch.context_lens, self._block_size, window=bound
            )
            for bound in set(bounds.values())
        }
        return {window: plans[bound] for window, bound in bounds.items()}


class CompiledAttention:
    """The compiled kernels on the processor, for models whose other parts are torch's."""

    def __init__(self, cache: Tensor, layers: Sequence[LayerAttention], team: Team) -> None:
        self._caches = [CacheLayer(cache, layer) for layer in range(cache.shape[1])]
        self._layers, self._team = layers, team

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots)
        block_tables = torch.from_numpy(batch.block_tables)
        query_starts = torch.from_numpy(batch.query_starts)
        context_lens = torch.from_numpy(batch.context_lens)

        def attend_layer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache, how = self._caches[layer], self._layers[layer]
            store(self._team, _per_token(key), _per_token(value), cache, slots)
            return attend(
                self._team,
                query.contiguous(),
                cache,
                block_tables,
                query_starts,
                context_lens,
                how.scale,
                window=how.window,
                soft_cap=how.soft_cap,
            )

        return attend_layer


def _per_token(heads: Tensor) -> Tensor:
    """The same [num_tokens, num_heads, head_dim], each token's heads contiguous."""
    is_contiguous = heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2])
    return heads if is_contiguous else heads.contiguous()


def _caches(cache: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Views of each layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim]."""
    return [(cache[:, layer, 0], cache[:, layer, 1]) for layer in range(cache.shape[1])]
