"""Quire's own Triton kernels: decodes by the plan of the step, other sequences by its tiles of queries."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quire_kernels.decode_plan import decode_splits
from quire_kernels.paged_attention import paged_attention, unsupported_heads
from quire_kernels.paged_decode import paged_decode
from quire_kernels.prefill_tiles import queries_per_tile
from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.gpu.attention_planner import AttentionPlanner
from worker_svc.gpu.device_attention import Arrays, AttentionSetup, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs


class TritonDeviceAttention:
    """A `DeviceAttention`."""

    mixed_graph_problem = None

    def __init__(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> None:
        self._layers = list(zip(setup.layers, caches, strict=True))
        heads = setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.dtype, setup.cache_dtype, setup.device
        # Tiles have one size, whatever the step holds: a token gets the same bits alone and among others of its
        # sequence. That holds for decodes too if they have no plan.
        windows = [] if setup.deterministic else dict.fromkeys(rule.window for rule in setup.layers)
        splits = [decode_splits(*heads, window) for window in windows]
        self._planner = AttentionPlanner(splits, queries_per_tile(*heads), setup.max_step_tokens)

    def num_plan_bytes(self, num_seqs: int) -> int:
        return self._planner.num_bytes(num_seqs)

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        return self._planner.plan(batch, num_single)

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        step = self._planner.on_device(inputs)
        num_decodes, plans = step.num_decodes, step.decode_plans

        def attend(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            rule, cache = self._layers[layer]
            gathered = torch.empty_like(query)
            pages = cache.keys, cache.values
            how: dict[str, Any] = {
                "window": rule.window,
                "soft_cap": rule.soft_cap,
                "sinks": sinks,
                "key_scales": cache.key_scales,
                "value_scales": cache.value_scales,
            }
            if num_decodes:
                out, plan = gathered[:num_decodes], plans[rule.window]
                paged_decode(query[:num_decodes], *pages, *step.decodes, plan, rule.scale, **how, out=out)
            if step.tiles is not None:
                how |= {"out": gathered, "tiles": step.tiles}
                paged_attention(query, *pages, *step.longer, inputs.max_query_len, rule.scale, **how)
            return gathered

        return attend


class TritonBackend:
    """A `DeviceAttentionBackend`."""

    computes_sinks = True

    def library_version(self) -> str:
        return f"triton {triton.__version__}"

    def unsupported_reason(self, setup: AttentionSetup) -> str | None:
        return unsupported_heads(setup.head_dim)

    def make(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
        return TritonDeviceAttention(setup, caches)


BACKEND = TritonBackend()
