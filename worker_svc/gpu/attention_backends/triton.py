"""Quire's own Triton kernels: decodes by the plan of the step, other sequences by tiles of queries."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from quire_kernels.decode_plan import DecodePlan, decode_splits
from quire_kernels.paged_attention import paged_attention, unsupported_heads
from quire_kernels.paged_decode import paged_decode
from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.gpu.decode_planner import DecodePlanner
from worker_svc.gpu.device_attention import Arrays, AttentionSetup, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs


class TritonDeviceAttention:
    """A `DeviceAttention`."""

    def __init__(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> None:
        self._layers = list(zip(setup.layers, caches, strict=True))
        # Of 2 or more, tiles have one size, whatever the step holds: a token gets the same bits alone and among others
        # of its sequence. For the same reason decodes have no plan then.
        self._least_query_len = 2 if setup.deterministic else 1
        heads = setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.dtype, setup.cache_dtype, setup.device
        windows = [] if setup.deterministic else dict.fromkeys(rule.window for rule in setup.layers)
        self._planner = DecodePlanner([decode_splits(*heads, window) for window in windows])

    def num_plan_bytes(self, num_seqs: int) -> int:
        return self._planner.num_bytes(num_seqs)

    def plan(self, batch: Batch, num_rows: int) -> Arrays:
        return self._planner.plan(batch, num_rows)

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        return partial(self._attend, inputs, self._planner.on_device(inputs))

    def _attend(
        self, inputs: ForwardInputs, plans: Mapping[int | None, DecodePlan], layer: int, query: Tensor
    ) -> Tensor:
        rule, cache = self._layers[layer]
        plan = plans.get(rule.window)
        single = 0 if plan is None else inputs.num_single
        gathered = torch.empty_like(query)
        if plan is not None:
            paged_decode(
                query[:single],
                cache.keys,
                cache.values,
                inputs.block_tables[:single],
                inputs.context_lens[:single],
                plan,
                rule.scale,
                window=rule.window,
                soft_cap=rule.soft_cap,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                out=gathered[:single],
            )
        if single < len(inputs.context_lens):
            paged_attention(
                query,
                cache.keys,
                cache.values,
                inputs.block_tables[single:],
                inputs.query_starts[single:],
                inputs.context_lens[single:],
                max(inputs.max_query_len, self._least_query_len),
                rule.scale,
                window=rule.window,
                soft_cap=rule.soft_cap,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                out=gathered,
            )
        return gathered


class TritonBackend:
    """A `DeviceAttentionBackend`."""

    def unsupported_reason(self, setup: AttentionSetup) -> str | None:
        return unsupported_heads(setup.head_dim)

    def make(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
        return TritonDeviceAttention(setup, caches)


BACKEND = TritonBackend()
