"""A layer's experts by torch's operators: tokens are grouped by expert; an expert without tokens is not computed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker_svc.model.building import BuiltMlp, ExpertWeights, MlpWeights
from worker_svc.model.description import ExpertGroups, ExpertScores, ExpertsSpec
from worker_svc.model.linear import make_linear
from worker_svc.model.torch_mlp import TorchMlp, activated


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """A mixture of experts. The router's scores, the weights and the weighted sum are float32."""

    spec: ExpertsSpec
    router: Tensor
    """float32 [num_experts, hidden_size], with one more row for the gate of the shared MLP"""
    experts: Sequence[TorchMlp]
    shared: TorchMlp | None
    choice_bias: Tensor | None = None
    """float32 [num_experts]"""
    router_bias: Tensor | None = None
    """float32, of as many rows as the router"""
    weight_scales: Tensor | None = None
    """float32 [num_experts]"""

    def __call__(self, inputs: Tensor, scored: Tensor | None = None) -> Tensor:
        """The float32 output for `inputs` [num_tokens, hidden_size]. The router scores `scored` of the same shape, if
        there are any.
        """
        spec, num_experts = self.spec, len(self.experts)
        scores = F.linear((inputs if scored is None else scored).float(), self.router, self.router_bias)
        weights, chosen = self._choose(scores[:, :num_experts])
        if spec.normalized:
            weights /= weights.sum(-1, keepdim=True)
        if self.weight_scales is not None:
            weights = weights * self.weight_scales[chosen]
        output = self._rows(inputs, chosen).mul_((weights * spec.scale)[:, :, None]).sum(1)
        if self.shared is not None:
            shared = self.shared.down(activated(self.shared, inputs)).float()
            output += shared * scores[:, num_experts:].sigmoid() if spec.has_shared_gate else shared
        return output

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts, both [num_tokens, num_chosen]."""
        spec = self.spec
        weights = scores.softmax(-1) if spec.scores is ExpertScores.SOFTMAX else scores.sigmoid()
        ranked = weights if self.choice_bias is None else weights + self.choice_bias
        if spec.groups is not None:
            ranked = _within_groups(ranked, spec.groups)
        chosen = ranked.topk(spec.num_chosen).indices
        return weights.gather(1, chosen), chosen

    def _rows(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """What a token's experts `chosen` [num_tokens, num_chosen] return, float32 [num_tokens, num_chosen, hidden]."""
        flat = chosen.flatten()
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        rows = torch.empty(len(flat), inputs.shape[1], device=inputs.device)
        for expert, places in zip(self.experts, torch.split(flat.argsort(stable=True), counts), strict=True):
            if len(places):
                rows[places] = expert.down(activated(expert, inputs[places // chosen.shape[1]])).float()
        return rows.view(*chosen.shape, -1)


def _within_groups(ranked: Tensor, groups: ExpertGroups) -> Tensor:
    """The same [num_tokens, num_experts], but -inf outside of each token's groups."""
    grouped = ranked.view(len(ranked), groups.count, -1)
    best = grouped.topk(groups.num_summed).values.sum(-1).topk(groups.num_chosen).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(outside[..., None], -math.inf).flatten(-2)


def build_torch_experts(weights: ExpertWeights) -> TorchExperts:
    router, bias = weights.router.fused()
    experts = [_mlp(expert) for expert in weights.experts]
    shared = None if weights.shared is None else _mlp(weights.shared)
    router_bias = None if bias is None else bias.float()
    biases = weights.choice_bias, router_bias
    return TorchExperts(weights.spec, router.float(), experts, shared, *biases, weights.weight_scales)


def _mlp(weights: MlpWeights) -> TorchMlp:
    return BuiltMlp(weights.spec, make_linear(*weights.gate_up.fused()), make_linear(*weights.down.fused()))
