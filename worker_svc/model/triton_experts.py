"""A layer's experts on a GPU. Nothing waits for the device, and all sizes follow from the number of tokens: a step with
experts can be a captured graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.activation import Activation
from quire_kernels.choose_experts import Groups, choose_experts
from quire_kernels.coded_rows import code_rows
from quire_kernels.combine_experts import combine_experts
from quire_kernels.group_by_expert import group_by_expert
from quire_kernels.grouped_linear import choose_tile_rows
from quire_kernels.invariant_linear import invariant_linear
from worker_svc.model.building import ExpertWeights
from worker_svc.model.description import ExpertScores, ExpertsSpec
from worker_svc.model.device_formats import Quantization
from worker_svc.model.triton_expert_products import ExpertProducts, build_expert_products
from worker_svc.model.triton_products import Product, activated, build_product


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """The weights of a mixture of experts, on their device. Its scores and weights are float32."""

    spec: ExpertsSpec
    router: Tensor
    """[num_experts, or one more for the gate of the shared MLP, hidden_size]"""
    products: ExpertProducts
    shared: tuple[Product, Product] | None
    """Gate and up, and down, of the MLP of all tokens; None: there is none."""
    deterministic: bool
    """Whether a token's bits do not depend on the other tokens."""
    choice_bias: Tensor | None = None
    """float32 [num_experts]"""
    router_bias: Tensor | None = None
    """In the model's dtype, of as many rows as the router"""
    weight_scales: Tensor | None = None
    """float32 [num_experts]"""

    def __call__(self, inputs: Tensor, scored: Tensor | None = None) -> Tensor:
        """The output for `inputs` [num_tokens, hidden_size], in their dtype. The router scores `scored` of the same
        shape, if there are any.
        """
        spec, num_experts = self.spec, self.products.num_experts
        activation = Activation(spec.experts[0].activation.value)
        scores = self._scores(inputs if scored is None else scored)
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
        if self.weight_scales is not None:
            weights *= self.weight_scales.index_select(0, experts.flatten()).view_as(weights)
        num_rows = experts.numel()
        tile_rows = choose_tile_rows(num_rows, num_experts, inputs.dtype, deterministic=self.deterministic)
        by_expert = group_by_expert(experts, num_experts, tile_rows)
        coding = self.products.coding
        # The router takes them as they are.
        coded = inputs if coding is None else code_rows(inputs, coding)
        rows = self.products(coded, by_expert, num_rows, activation)
        shared = shared_gate = None
        if self.shared is not None:
            gate_up, down = self.shared
            read = coded if gate_up.coding == coding else inputs
            shared = down(activated(gate_up(read), activation, down.coding, is_gated=True))
            shared_gate = scores[:, num_experts] if spec.has_shared_gate else None
        return combine_experts(rows, weights, shared, shared_gate)

    def _scores(self, inputs: Tensor) -> Tensor:
        """float32 [num_tokens, rows of the router]"""
        scores = torch.empty(len(inputs), len(self.router), device=inputs.device)
        if self.deterministic:
            return invariant_linear(inputs, self.router, self.router_bias, out=scores)
        if inputs.dtype == torch.float32:
            torch.mm(inputs, self.router.t(), out=scores)
        else:
            torch.mm(inputs, self.router.t(), out_dtype=torch.float32, out=scores)
        return scores if self.router_bias is None else scores.add_(self.router_bias)


def build_triton_experts(
    weights: ExpertWeights, quantization: Quantization | None, *, deterministic: bool
) -> TritonExperts:
    """Scores are in the model's dtype. Raises UnsupportedModel where codes of experts are not alike."""
    router, router_bias = weights.router.fused()
    shared = None
    if weights.shared is not None:
        gate_up, down = (
            build_product(each, quantization, deterministic=deterministic)
            for each in (weights.shared.gate_up, weights.shared.down)
        )
        shared = gate_up, down
    products = build_expert_products(weights.experts, quantization)
    biases = weights.choice_bias, router_bias
    return TritonExperts(weights.spec, router, products, shared, deterministic, *biases, weights.weight_scales)
