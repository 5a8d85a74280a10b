"""The products of a layer's experts on a GPU: in the model's dtype, or with weights, and rows too, in codes.

Rows are grouped by expert (`group_by_expert`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from quire_kernels.activation import Activation
from quire_kernels.coded_rows import CodedRows, RowCoding
from quire_kernels.group_by_expert import ExpertGroups
from quire_kernels.grouped_linear import grouped_linear
from quire_kernels.scaled_linear import CodedMatrix, grouped_scaled_linear
from quire_kernels.weight_only_linear import grouped_weight_only_linear
from quire_kernels.weight_only_matrix import WeightOnlyMatrix
from worker_svc.errors import UnsupportedModel
from worker_svc.model.building import MlpWeights
from worker_svc.model.device_formats import Quantization
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.triton_products import BuiltMatrix, Rows, activated, build_matrix

MatrixT = TypeVar("MatrixT", bound=tuple[Tensor, Tensor | None] | BuiltMatrix)


class ExpertProducts(Protocol):
    """Gated MLPs of experts."""

    @property
    def num_experts(self) -> int: ...

    @property
    def coding(self) -> RowCoding | None:
        """How the inputs are coded; None: they are not."""

    def __call__(self, inputs: Rows, groups: ExpertGroups, num_rows: int, activation: Activation) -> Tensor:
        """The outputs of all rows [num_rows, outputs]. Row r reads input r // (num_rows / number of inputs)."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts:
    """`ExpertProducts` in the model's dtype."""

    gate_up: Tensor
    """[num_experts, 2 * width, hidden_size]"""
    down: Tensor
    """[num_experts, hidden_size, width]"""
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    """[num_experts, outputs]; None: there are none."""

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def coding(self) -> None:
        return None

    def __call__(self, inputs: Rows, groups: ExpertGroups, num_rows: int, activation: Activation) -> Tensor:
        assert isinstance(inputs, Tensor)
        active = grouped_linear(inputs, self.gate_up, groups, num_rows, activation, self.gate_up_bias)
        return grouped_linear(active, self.down, groups, num_rows, bias=self.down_bias)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExperts:
    """`ExpertProducts` with weights in codes, and rows where their product takes them; each tensor of a weight has a
    first dimension of experts.
    """

    gate_up: CodedMatrix | WeightOnlyMatrix
    down: CodedMatrix | WeightOnlyMatrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    """[num_experts, outputs] in `dtype`; None: there are none."""
    dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        return len(self.gate_up.scales)

    @property
    def coding(self) -> RowCoding | None:
        return self.gate_up.coding

    def __call__(self, inputs: Rows, groups: ExpertGroups, num_rows: int, activation: Activation) -> Tensor:
        gate_up = self._multiply(inputs, self.gate_up, self.gate_up_bias, groups, num_rows)
        active = activated(gate_up, activation, self.down.coding, is_gated=True)
        return self._multiply(active, self.down, self.down_bias, groups, num_rows)

    def _multiply(
        self,
        rows: Rows,
        weight: CodedMatrix | WeightOnlyMatrix,
        bias: Tensor | None,
        groups: ExpertGroups,
        num_rows: int,
    ) -> Tensor:
        if isinstance(weight, CodedMatrix):
            assert isinstance(rows, CodedRows)
            return grouped_scaled_linear(rows, weight, groups, num_rows, self.dtype, bias)
        assert isinstance(rows, Tensor)
        return grouped_weight_only_linear(rows, weight, groups, num_rows, bias)


def build_expert_products(experts: Sequence[MlpWeights], quantization: Quantization | None) -> ExpertProducts:
    """The experts of a layer, which are alike. Raises UnsupportedModel if their codes are not."""
    gate_ups, downs = [expert.gate_up for expert in experts], [expert.down for expert in experts]
    if quantization is None:
        (gate_up, gate_up_bias), (down, down_bias) = (
            _stacked(each, lambda weights: weights.fused()) for each in (gate_ups, downs)
        )
        return DenseExperts(gate_up, down, gate_up_bias, down_bias)

    def coded(weights: LinearWeights) -> BuiltMatrix:
        return build_matrix(weights, quantization, of_expert=True)

    of_gate_up, of_down = _stacked(gate_ups, coded), _stacked(downs, coded)
    return QuantizedExperts(of_gate_up.matrix, of_down.matrix, of_gate_up.bias, of_down.bias, gate_ups[0].dtype)


def _stacked(layers: Sequence[LinearWeights], build: Callable[[LinearWeights], MatrixT]) -> MatrixT:
    """The tensors of equal layers, each with a first dimension more: one layer is read after the other."""
    first = build(layers[0])
    leaves, form = tree_flatten(first)
    stacked = [leaf.new_empty(len(layers), *leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for number, layer in enumerate(layers):
        matrix = build(layer) if number else first
        found, other = tree_flatten(matrix)
        if other != form or list(map(_kind, found)) != list(map(_kind, leaves)):
            name = layer.layer.stored[0].name
            raise UnsupportedModel(f"{name}: its codes have another form than those of other experts")
        for into, leaf in zip(stacked, found, strict=True):
            if isinstance(leaf, Tensor):
                into[number] = leaf
    made: MatrixT = tree_unflatten(stacked, form)
    return made


def _kind(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
