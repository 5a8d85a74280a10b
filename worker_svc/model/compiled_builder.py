"""A described model's weights, laid out for the compiled code of CPUs while they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire_kernels.cpu.activations import ActivationCode
from quire_kernels.cpu.amx import amx_input_multiple, has_amx, pack_for_amx
from quire_kernels.cpu.experts import ExpertScoring, PackedExperts
from quire_kernels.cpu.head_bounds import PackedHeadBounds, can_bound, pack_head_bounds
from quire_kernels.cpu.large_pages import LargePages
from quire_kernels.cpu.latent import PackedLatent
from quire_kernels.cpu.linear import (
    MatrixFormat,
    PackedMatrix,
    pack_grouped_bytes,
    pack_matrix,
    pack_nibbles,
)
from quire_kernels.cpu.nibbles import NibbleWeight, quantize_in_nibbles
from quire_kernels.cpu.norms import NormCode, PackedNorm, pack_norm
from quire_kernels.cpu.thread_pool import ThreadPool
from worker_svc.host import multiplies_bytes
from worker_svc.model.block_weights import read_blocks
from worker_svc.model.building import BuiltLatent, ExpertWeights, MlpWeights
from worker_svc.model.description import ComputedFormat, LinearLayer, LinearRole, ModelDescription, Norm
from worker_svc.model.linear_weights import LinearWeights, WeightParts
from worker_svc.model.nibble_weights import read_nibbles
from worker_svc.model.panel_order import GateAndUp, HalfHeads, PanelOrder, join, read_joined
from worker_svc.page_release import trim_heap

_FORMATS = {
    ComputedFormat.MODEL: MatrixFormat.PLAIN,
    ComputedFormat.INT8: MatrixFormat.INT8,
    ComputedFormat.W8A8: MatrixFormat.W8A8,
    ComputedFormat.W4A16: MatrixFormat.W4A16,
    ComputedFormat.W4A8: MatrixFormat.W4A8,
}
IN_NIBBLES = {MatrixFormat.INT8: MatrixFormat.W4A16, MatrixFormat.W8A8: MatrixFormat.W4A8}
"""The formats of layers whose codes have 4 bits in the checkpoint, which are kept, by those that are asked."""
# A head in 4 bits would cost more quality than all layers, and often is the embedding too.
_OF_HEADS = {MatrixFormat.W4A16: MatrixFormat.INT8, MatrixFormat.W4A8: MatrixFormat.W8A8}


@dataclass(frozen=True, slots=True)
class CompiledHead:
    """The head of a decoder."""

    matrix: PackedMatrix
    bounds: PackedHeadBounds | None
    """By which few logits are computed where the largest is wanted; None: all are."""


class CompiledBuilder:
    """Lays weights out for the compiled code while they are read."""

    def __init__(
        self,
        thread_pool: ThreadPool,
        dtype: torch.dtype,
        default: MatrixFormat = MatrixFormat.PLAIN,
        *,
        of_encoder: bool = False,
        may_use_amx: bool = True,
        pairs_halves: bool = True,
        bounds_head: bool = False,
    ) -> None:
        """`dtype`: of the model. `default`: the format of layers that name none. An encoder that is float32 without
        codes is computed by AMX too, if `may_use_amx`. `pairs_halves`: whether a panel has the halves of a head, which
        are rotated against each other. `bounds_head`: whether a head in the model's dtype has
        bounds too, where products are not computed by AMX: see `can_bound_head`.
        """
        self.thread_pool, self.dtype, self._default, self._pairs_halves = thread_pool, dtype, default, pairs_halves
        is_fit = dtype == torch.bfloat16 or (of_encoder and default is MatrixFormat.PLAIN)
        self.use_amx = may_use_amx and is_fit and has_amx(thread_pool)
        """Whether products are computed by AMX."""
        self._bounds_head = bounds_head and not self.use_amx
        self._memory = LargePages()

    def linear(self, weights: LinearWeights) -> PackedMatrix:
        # The C library keeps what the layer before was made of: its tensors are of such sizes.
        trim_heap()
        return self._linear(weights)

    def norm(self, norm: Norm, weight: Tensor, bias: Tensor | None) -> PackedNorm:
        return pack_norm(NormCode[norm.kind.name], norm.weight_of(weight), bias, norm.eps)

    def experts(self, weights: ExpertWeights) -> PackedExperts:
        trim_heap()
        spec, groups = weights.spec, weights.spec.groups
        router, experts = self._linear(weights.router), [self._mlp(expert) for expert in weights.experts]
        return PackedExperts(
            router,
            [gate_up for gate_up, _ in experts],
            [down for _, down in experts],
            spec.num_chosen,
            spec.normalized,
            spec.scale,
            ActivationCode[spec.experts[0].activation.name],
            None if weights.shared is None else self._mlp(weights.shared),
            ExpertScoring[spec.scores.name],
            weights.choice_bias,
            None if groups is None else (groups.count, groups.num_chosen, groups.num_summed),
            weights.weight_scales,
        )

    def latent(self, built: BuiltLatent[PackedMatrix, PackedNorm]) -> PackedLatent:
        """The products of single heads stay in the model's dtype: they are small, and their errors would add up."""
        spec, query = built.spec, None
        if spec.query_norm is not None and built.query_norm is not None and built.query_up is not None:
            query = spec.query_norm.size, built.query_norm, built.query_up
        pack = partial(self._pack, MatrixFormat.PLAIN, bias=None)
        return PackedLatent(
            spec.rank,
            spec.rotated_dim,
            spec.plain_dim,
            spec.value_dim,
            spec.rotates_neighbours,
            built.kv_norm,
            [pack(head[: spec.plain_dim].t()) for head in built.kv_up],
            [pack(head[spec.plain_dim :]) for head in built.kv_up],
            query,
        )

    def head(self, weights: WeightParts) -> CompiledHead:
        matrix_format = self._format_of(weights.layer)
        if weights.codes.has_blocks and matrix_format is not MatrixFormat.PLAIN:
            return CompiledHead(self._blocks(weights, matrix_format, torch.cat), None)
        weight, bias = weights.fused(self._dtype_of(weights, matrix_format))
        code_scales = torch.cat(weights.code_scales) if weights.code_scales else None
        matrix = self._pack(_OF_HEADS.get(matrix_format, matrix_format), weight, bias, code_scales)
        if not self._bounds_head or matrix_format is not MatrixFormat.PLAIN:
            return CompiledHead(matrix, None)
        return CompiledHead(matrix, pack_head_bounds(self.thread_pool, weight, self._memory))

    def _mlp(self, weights: MlpWeights) -> tuple[PackedMatrix, PackedMatrix]:
        return self._linear(weights.gate_up, of_expert=True), self._linear(weights.down, of_expert=True)

    def _linear(self, weights: LinearWeights, *, of_expert: bool = False) -> PackedMatrix:
        matrix_format = self._format_of(weights.layer)
        kept = IN_NIBBLES.get(matrix_format) if weights.codes.keeps_nibbles(of_expert=of_expert) else None
        order = self._order_of(weights)
        join_parts = torch.cat if order is None else partial(join, order)
        if weights.codes.keeps_blocks(of_expert=of_expert) and matrix_format is not MatrixFormat.PLAIN:
            return self._blocks(weights, matrix_format, join_parts)
        if kept is not None or matrix_format.has_nibbles:
            quantize = partial(quantize_in_nibbles, self.thread_pool) if kept is None else None
            dtype = self.dtype if kept is None else weights.code_dtype
            held, bias = read_nibbles(weights, quantize, dtype, join_parts, of_expert=of_expert)
            if isinstance(held, Tensor):
                return self._pack(matrix_format, held, bias)
            return pack_nibbles(
                self.thread_pool,
                held,
                bias,
                matrix_format=kept or matrix_format,
                dtype=self.dtype,
                memory=self._memory,
                input_multiple=self._input_multiple(kept or matrix_format),
            )
        dtype = self._dtype_of(weights, matrix_format)
        if order is not None:
            return self._pack(matrix_format, *read_joined(order, weights, dtype))
        weight, bias = weights.fused(dtype)
        return self._pack(matrix_format, weight, bias, torch.cat(weights.code_scales))

    def _blocks(
        self, weights: WeightParts, asked: MatrixFormat, join_parts: Callable[[list[Tensor]], Tensor]
    ) -> PackedMatrix:
        """A layer with its own codes, whatever bits are asked of weights. Activations have the bits that are asked."""
        held, bias = read_blocks(weights, join_parts, takes_e2m1=not asked.takes_codes)
        if isinstance(held, NibbleWeight):
            matrix_format = MatrixFormat.W4A8 if asked.takes_codes else MatrixFormat.W4A16
            pack: Callable[..., PackedMatrix] = pack_nibbles
        else:
            matrix_format = MatrixFormat.GROUPED_W8A8 if asked.takes_codes else MatrixFormat.GROUPED_W8A16
            pack = pack_grouped_bytes
        return pack(
            self.thread_pool,
            held,
            bias,
            matrix_format=matrix_format,
            dtype=self.dtype,
            memory=self._memory,
            input_multiple=self._input_multiple(matrix_format),
        )

    def _order_of(self, weights: LinearWeights) -> PanelOrder | None:
        """None: the parts side by side."""
        layer, outputs = weights.layer, weights.outputs
        if layer.role is LinearRole.GATE_UP and len(outputs) == 2:
            return GateAndUp(outputs[0])
        return HalfHeads(outputs, layer.split_unit) if self._pairs_halves and pairs_halves(layer) else None

    def _input_multiple(self, matrix_format: MatrixFormat) -> int:
        return amx_input_multiple(matrix_format) if self.use_amx else 1

    def _dtype_of(self, weights: WeightParts, matrix_format: MatrixFormat) -> torch.dtype:
        """In which the numbers of a layer are read before they are laid out."""
        return self.dtype if matrix_format is MatrixFormat.PLAIN else weights.code_dtype

    def _format_of(self, layer: LinearLayer) -> MatrixFormat:
        return self._default if layer.computed is None else _FORMATS[layer.computed]

    def _pack(
        self, matrix_format: MatrixFormat, weight: Tensor, bias: Tensor | None, code_scales: Tensor | None = None
    ) -> PackedMatrix:
        pack = pack_for_amx if self.use_amx else pack_matrix
        return pack(
            self.thread_pool,
            weight,
            bias,
            matrix_format=matrix_format,
            memory=self._memory,
            code_scales=code_scales,
            dtype=self.dtype,
        )


def can_bound_head(description: ModelDescription) -> bool:
    """Whether a head in the model's dtype may have bounds: the largest product with a weight must be the largest
    logit, and this processor multiply bytes faster than other numbers.
    """
    head = description.head
    is_linear = description.logits_soft_cap is None and description.logits_scale > 0 and not head.biased
    return is_linear and can_bound(head.inputs) and multiplies_bytes()


def pairs_halves(layer: LinearLayer) -> bool:
    """Whether the outputs of a layer are those of heads whose halves are paired. Latent vectors have no heads."""
    return layer.role is LinearRole.QKV and HalfHeads.suits(layer.split_unit)
