"""Multi-head latent attention on a GPU (arXiv:2405.04434, section 2.1), as `torch_latent` describes it.

A layer's queries are one tensor [num_tokens, num_heads, rank + rotated dimensions]: the product for keys writes the
first dimensions of each head, the rotation the last ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels._attend_latent import unsupported_rank
from quire_kernels.head_linear import head_linear
from quire_kernels.latent_attention import latent_attention, latent_queries_per_tile
from quire_kernels.latent_decode import latent_decode, latent_splits
from quire_kernels.latent_store import latent_store
from quire_kernels.row_norm import RowNorm, row_norm, row_norm_codes
from worker_svc.batch import Batch
from worker_svc.cache import LayerCache
from worker_svc.gpu.attention_planner import AttentionPlanner
from worker_svc.gpu.device_attention import Arrays, AttentionSetup, PlannedAttention
from worker_svc.gpu.inputs import ForwardInputs
from worker_svc.model.building import BuiltLatent
from worker_svc.model.description import AttentionSpec, LatentSpec, ModelDescription
from worker_svc.model.triton_products import Product


def store_latents(
    spec: AttentionSpec,
    latent: BuiltLatent[Product, RowNorm],
    projected: Tensor,
    frequencies: Tensor,
    attention_factor: float,
    cache: LayerCache,
    inputs: ForwardInputs,
) -> Tensor:
    """The queries of a layer, given what `spec.qkv` returned; latent vectors and rotated keys go to its cache."""
    queries, compressed = torch.split(projected, list(spec.qkv.outputs), -1)
    if latent.query_norm is not None and latent.query_up is not None:
        coding, norm = latent.query_up.coding, latent.query_norm
        normed = row_norm(queries, norm, queries.dtype) if coding is None else row_norm_codes(queries, norm, coding)
        queries = latent.query_up(normed)
    heads = queries.view(len(queries), spec.num_heads, latent.spec.query_dim)
    plain, rank = latent.spec.plain_dim, latent.spec.rank
    query = heads.new_empty(len(heads), spec.num_heads, spec.head_dim)
    head_linear(heads[..., :plain], latent.kv_up[:, :plain].transpose(1, 2), out=query[..., :rank])
    latent_store(
        compressed,
        heads[..., plain:],
        inputs.positions,
        frequencies,
        latent.kv_norm,
        cache.keys,
        inputs.slots,
        query,
        rotates_neighbours=latent.spec.rotates_neighbours,
        attention_factor=attention_factor,
        key_scales=cache.key_scales,
    )
    return query


class LatentDeviceAttention:
    """A `DeviceAttention` over latent vectors: of each query, the sums of latent vectors [num_heads, rank].

    Sequences of one token are computed by their plan, others, or all if there is none, by tiles of queries, whose bits
    do not depend on other tokens.
    """

    mixed_graph_problem = None

    def __init__(self, latent: LatentSpec, setup: AttentionSetup, caches: Sequence[LayerCache]) -> None:
        self._rank = latent.rank
        self._layers = list(zip(setup.layers, caches, strict=True))
        sizes = setup.num_heads, latent.rank, latent.rotated_dim, setup.dtype, setup.cache_dtype, setup.device
        # Layers with latent attention have no window.
        splits = [] if setup.deterministic else [latent_splits(*sizes)]
        self._planner = AttentionPlanner(splits, latent_queries_per_tile(*sizes), setup.max_step_tokens)

    def num_plan_bytes(self, num_seqs: int) -> int:
        return self._planner.num_bytes(num_seqs)

    def plan(self, batch: Batch, num_single: int) -> Arrays:
        return self._planner.plan(batch, num_single)

    def attend(self, inputs: ForwardInputs) -> PlannedAttention:
        step = self._planner.on_device(inputs)
        num_decodes, plan = step.num_decodes, step.decode_plans.get(None)

        def attend(layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
            assert sinks is None, "a description has none with latent vectors"
            rule, cache = self._layers[layer]
            gathered = query.new_empty(*query.shape[:2], self._rank)
            keys, scales = cache.keys, cache.key_scales
            if plan is not None:
                out, of_decodes = gathered[:num_decodes], query[:num_decodes]
                latent_decode(of_decodes, keys, *step.decodes, plan, self._rank, rule.scale, key_scales=scales, out=out)
            if step.tiles is not None:
                latent_attention(
                    query, keys, *step.longer, self._rank, rule.scale, key_scales=scales, out=gathered, tiles=step.tiles
                )
            return gathered

        return attend


def latent_values(latent: BuiltLatent[Product, RowNorm], gathered: Tensor) -> Tensor:
    """The values of all heads [num_tokens, num_heads, value_dim], of the sums of latent vectors."""
    return head_linear(gathered, latent.kv_up[:, latent.spec.plain_dim :])


def unsupported_latents(description: ModelDescription) -> str | None:
    """Why the Triton kernels cannot attend to a model's latent vectors; None: they can, or there are none."""
    ranks = [layer.attention.latent.rank for layer in description.layers if layer.attention.latent is not None]
    return unsupported_rank(max(ranks)) if ranks else None
