"""Quire's own Triton kernels: decodes by the plan of the step, other sequences by tiles of queries."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quire_kernels.decode_plan import decode_splits
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

    @property
    def mixed_graph_problem(self) -> str | None:
        return None

    def num_plan_bytes(self, num_seqs: int) -> int:
        return self._planner.num_bytes(num_seqs)

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        return self._planner.plan(batch, num_single)

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        plans = self._planner.on_device(inputs)
        single = inputs.num_single if plans else 0
        # Sliced once, not in each layer
        tables, contexts = inputs.block_tables, inputs.context_lens
        decodes = tables[:single], contexts[:single]
        longer = tables[single:], inputs.query_starts[single:], contexts[single:]
        max_query_len = max(inputs.max_query_len, self._least_query_len)

        def attend(layer: int, query: Tensor) -> Tensor:
            rule, cache = self._layers[layer]
            gathered = torch.empty_like(query)
            pages = cache.keys, cache.values
            how: dict[str, Any] = {
                "window": rule.window,
                "soft_cap": rule.soft_cap,
                "key_scales": cache.key_scales,
                "value_scales": cache.value_scales,
            }
            if single:
                out, plan = gathered[:single], plans[rule.window]
                paged_decode(query[:single], *pages, *decodes, plan, rule.scale, **how, out=out)
            if len(longer[0]):
                paged_attention(query, *pages, *longer, max_query_len, rule.scale, **how, out=gathered)
            return gathered

        return attend


class TritonBackend:
    """A `DeviceAttentionBackend`."""

    def library_version(self) -> str:
        return f"triton {triton.__version__}"

    def unsupported_reason(self, setup: AttentionSetup) -> str | None:
        return unsupported_heads(setup.head_dim)

    def make(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> DeviceAttention:
        return TritonDeviceAttention(setup, caches)


BACKEND = TritonBackend()
