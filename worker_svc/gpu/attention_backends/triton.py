"""Quire's own Triton kernels: decodes by the plan of the step, other sequences by its tiles of queries."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from quire_kernels.decode_plan import decode_splits
from quire_kernels.paged_attention import paged_attention, unsupported_heads
from quire_kernels.paged_decode import paged_decode
from quire_kernels.prefill_tiles import PrefillTiles, most_tiles, plan_tiles, queries_per_tile
from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.gpu.decode_planner import DecodePlanner
from worker_svc.gpu.device_attention import Arrays, AttentionSetup, DeviceAttention, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.gpu.staging import ALIGNMENT


class TritonDeviceAttention:
    """A `DeviceAttention`."""

    def __init__(self, setup: AttentionSetup, caches: Sequence[LayerCache]) -> None:
        self._layers = list(zip(setup.layers, caches, strict=True))
        heads = setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.dtype, setup.cache_dtype, setup.device
        # Tiles have one size, whatever the step holds: a token gets the same bits alone and among others of its
        # sequence. That holds for decodes too if they have no plan.
        windows = [] if setup.deterministic else dict.fromkeys(rule.window for rule in setup.layers)
        self._planner = DecodePlanner([decode_splits(*heads, window) for window in windows])
        self._tile_queries, self._max_tokens = queries_per_tile(*heads), setup.max_step_tokens

    @property
    def mixed_graph_problem(self) -> str | None:
        return None

    def num_plan_bytes(self, num_seqs: int) -> int:
        num_tiles = most_tiles(max(self._max_tokens, num_seqs), num_seqs, self._tile_queries)
        return self._planner.num_bytes(num_seqs) + 2 * 4 * num_tiles + ALIGNMENT

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        arrays = self._planner.plan(batch, num_single)
        single = num_single if arrays else 0
        if single < len(batch.context_lens):
            sequences = batch.query_starts[single:], batch.context_lens[single:]
            arrays.append(plan_tiles(*sequences, len(batch.token_ids), self._tile_queries))
        return arrays

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        plans = self._planner.on_device(inputs)
        single = inputs.num_single if plans else 0
        # Sliced once, not in each layer
        tables, contexts = inputs.block_tables, inputs.context_lens
        decodes = tables[:single], contexts[:single]
        longer = tables[single:], inputs.query_starts[single:], contexts[single:]
        tiles = PrefillTiles(self._tile_queries, inputs.plan[-1]) if len(longer[0]) else None

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
                paged_attention(
                    query, *pages, *longer, inputs.max_query_len, rule.scale, **how, out=gathered, tiles=tiles
                )
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
