"""Attention over the paged KV cache on a CPU, by compiled kernels or torch; that of a GPU is in
`worker_svc.gpu.device_attention`.

A backend lays out a step once (`plan`). The result stores and attends in each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.attention import CacheLayer, attend, check_compiled_support, store
from quire_kernels.cpu.linear import MatrixFormat
from quire_kernels.cpu.thread_pool import ThreadPool
from quire_kernels.cpu_attention import CpuAttentionPlan, cpu_paged_attention, cpu_store_kv, plan_cpu_attention
from worker_svc.batch import Batch
from worker_svc.cache import KVCache, LayerCache
from worker_svc.model_layout import LayerAttention, ModelLayout


class AttentionKind(StrEnum):
    """The kernels of attention."""

    TRITON = "triton"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """The compiled kernels: their thread pool, and the format of weights whose layers name none."""

    thread_pool: ThreadPool
    weights: MatrixFormat = MatrixFormat.PLAIN


Kernels: TypeAlias = AttentionKind | CompiledKernels


class StepAttention(Protocol):
    """Attention of one step."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores the keys and values [num_tokens, num_kv_heads, head_dim] of the step's tokens in their slots; None:
        those of a layer before this one are there.

        Returns the attention output of each query [num_tokens, num_heads, head_dim] over its sequence's context, in the
        shape of `query`. `sinks` float32 [num_heads] are those of a layer that has some.
        """


class AttentionBackend(Protocol):
    """Attention over one cache."""

    def plan(self, batch: Batch) -> StepAttention:
        """The attention of one batch."""


def make_attention(kernels: Kernels, cache: KVCache, layout: ModelLayout, dtype: torch.dtype) -> AttentionBackend:
    """A backend over a cache on a CPU, for the layers of a model that computes in `dtype`.

    If the compiled kernels do not support the cache's shape, torch is used, which supports no cache in 8 bits.
    """
    if len(layout.kv) != len(cache.layers):
        raise ValueError(f"cache: must be of {len(layout.kv)} layers, not {len(cache.layers)}")
    if kernels is AttentionKind.TRITON:
        raise ValueError("kernels: must not be Triton's, whose attention is in worker_svc.gpu.device_attention")
    caches = cache.of_layers(layout)
    unsupported_reason = check_compiled_support(layout.head_dims, cache.block_size, dtype)
    if isinstance(kernels, CompiledKernels) and unsupported_reason is None:
        return CompiledAttention(caches, layout.layers, kernels.thread_pool, dtype)
    if cache.has_scales:
        raise ValueError("cache: must not be in 8 bits where torch computes the attention")
    return TorchAttention(caches, layout.layers)


class TorchAttention:
    """torch's operators on a CPU, without a loop over sequences."""

    def __init__(self, caches: Sequence[LayerCache], layers: Sequence[LayerAttention]) -> None:
        """`caches` are those that the layers read."""
        self._caches, self._layers, self._block_size = caches, layers, caches[0].keys.shape[2]
        self._windows = {layer.window for layer in layers}

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots)
        plans = self._plan_windows(batch)

        def attend(
            layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, sinks: Tensor | None = None
        ) -> Tensor:
            cache, how = self._caches[layer], self._layers[layer]
            if key is not None and value is not None:
                cpu_store_kv(key, value, cache.keys, cache.values, slots)
            return cpu_paged_attention(
                query, cache.keys, cache.values, plans[how.window], how.scale, soft_cap=how.soft_cap, sinks=sinks
            )

        return attend

    def _plan_windows(self, batch: Batch) -> dict[int | None, CpuAttentionPlan]:
        longest = int(batch.context_lens.max())
        # A window that holds every context has no effect.
        bounds = {window: window if window is not None and window < longest else None for window in self._windows}
        plans = {
            bound: plan_cpu_attention(
                batch.block_tables, batch.query_starts, batch.context_lens, self._block_size, window=bound
            )
            for bound in set(bounds.values())
        }
        return {window: plans[bound] for window, bound in bounds.items()}


class CompiledAttention:
    """The compiled kernels on a CPU, for models whose other parts are torch's."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        layers: Sequence[LayerAttention],
        thread_pool: ThreadPool,
        dtype: torch.dtype,
    ) -> None:
        """`caches` are those that the layers read."""
        self._caches = [CacheLayer(each.keys, each.values, each.key_scales, each.value_scales) for each in caches]
        self._layers, self._thread_pool = layers, thread_pool
        self._use_amx = dtype == torch.bfloat16 and has_amx(thread_pool)

    def plan(self, batch: Batch) -> StepAttention:
        slots = torch.from_numpy(batch.slots)
        block_tables = torch.from_numpy(batch.block_tables)
        query_starts = torch.from_numpy(batch.query_starts)
        context_lens = torch.from_numpy(batch.context_lens)

        def attend_layer(
            layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, sinks: Tensor | None = None
        ) -> Tensor:
            cache, how = self._caches[layer], self._layers[layer]
            if key is not None and value is not None:
                store(self._thread_pool, _per_token(key), _per_token(value), cache, slots)
            return attend(
                self._thread_pool,
                query.contiguous(),
                cache,
                block_tables,
                query_starts,
                context_lens,
                how.scale,
                window=how.window,
                soft_cap=how.soft_cap,
                sinks=sinks,
                use_amx=self._use_amx,
            )

        return attend_layer


def _per_token(heads: Tensor) -> Tensor:
    """The same [num_tokens, num_heads, head_dim], each token's heads contiguous."""
    is_contiguous = heads.stride(2) == 1 and (heads.shape[1] == 1 or heads.stride(1) == heads.shape[2])
    return heads if is_contiguous else heads.contiguous()
