"""A layer's experts on a GPU. Nothing waits for the device, and all sizes follow from the number of tokens: a step with
experts can be a captured graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.activation import Activation, gated_activation
from quire_kernels.choose_experts import Groups, choose_experts
from quire_kernels.combine_experts import combine_experts
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.grouped_linear import choose_tile_rows, grouped_linear
from quire_kernels.invariant_linear import invariant_linear
from worker_svc.model.building import ExpertWeights
from worker_svc.model.description import ExpertScores, ExpertsSpec
from worker_svc.model.linear_weights import LinearWeights


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """The weights of a mixture of experts, on their device. Its scores and weights are float32."""

    spec: ExpertsSpec
    router: Tensor
    """[num_experts, or one more for the gate of the shared MLP, hidden_size]"""
    gate_up: Tensor
    """[num_experts, 2 * width, hidden_size]"""
    down: Tensor
    """[num_experts, hidden_size, width]"""
    shared_gate_up: Tensor | None
    shared_down: Tensor | None
    deterministic: bool
    """Whether a token's bits do not depend on the other tokens."""
    choice_bias: Tensor | None = None
    """float32 [num_experts]"""

    def __call__(self, inputs: Tensor) -> Tensor:
        """The output for `inputs` [num_tokens, hidden_size], in their dtype."""
        spec, num_experts = self.spec, len(self.gate_up)
        activation = Activation(spec.experts[0].activation.value)
        scores = self._scores(inputs)
        groups = spec.groups
        experts, weights = choose_experts(
            scores,
            num_experts,
            spec.num_chosen,
            normalized=spec.normalized,
            scale=spec.scale,
            sigmoid=spec.scores is ExpertScores.SIGMOID,
            bias=self.choice_bias,
            groups=None if groups is None else Groups(groups.count, groups.num_chosen, groups.num_summed),
        )
        num_rows = experts.numel()
        tile_rows = choose_tile_rows(num_rows, num_experts, inputs.dtype, deterministic=self.deterministic)
        by_expert = group_by_expert(experts, num_experts, tile_rows)
        active = grouped_linear(inputs, self.gate_up, by_expert, num_rows, activation)
        rows = grouped_linear(active, self.down, by_expert, num_rows)
        shared = shared_gate = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            gated = gated_activation(self._product(inputs, self.shared_gate_up), activation)
            shared = self._product(gated, self.shared_down)
            shared_gate = scores[:, num_experts] if spec.has_shared_gate else None
        return combine_experts(rows, weights, shared, shared_gate)

    def _scores(self, inputs: Tensor) -> Tensor:
        """float32 [num_tokens, rows of the router]"""
        scores = torch.empty(len(inputs), len(self.router), device=inputs.device)
        if self.deterministic:
            return invariant_linear(inputs, self.router, out=scores)
        if inputs.dtype == torch.float32:
            return torch.mm(inputs, self.router.t(), out=scores)
        return torch.mm(inputs, self.router.t(), out_dtype=torch.float32, out=scores)

    def _product(self, inputs: Tensor, weight: Tensor) -> Tensor:
        if self.deterministic:
            return invariant_linear(inputs, weight)
        return torch.nn.functional.linear(inputs, weight)


def build_triton_experts(weights: ExpertWeights, *, deterministic: bool) -> TritonExperts:
    router, _ = weights.router.fused()
    shared_gate_up = shared_down = None
    if weights.shared is not None:
        shared_gate_up, _ = weights.shared.gate_up.fused()
        shared_down, _ = weights.shared.down.fused()
    return TritonExperts(
        weights.spec,
        router,
        _stacked([expert.gate_up for expert in weights.experts]),
        _stacked([expert.down for expert in weights.experts]),
        shared_gate_up,
        shared_down,
        deterministic,
        weights.choice_bias,
    )


def _stacked(layers: Sequence[LinearWeights]) -> Tensor:
    """The weights of equal layers, [num_layers, outputs, inputs]."""
    first, _ = layers[0].fused()
    stacked = first.new_empty(len(layers), *first.shape)
    stacked[0] = first
    del first
    for number, layer in enumerate(layers[1:], start=1):
        stacked[number] = layer.fused()[0]
    return stacked
