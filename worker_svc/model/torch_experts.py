"""A layer's experts by torch's operators: tokens are grouped by expert; an expert without tokens is not computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.model.building import BuiltMlp, ExpertWeights, MlpWeights
from worker_svc.model.description import ExpertsSpec
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

    def __call__(self, inputs: Tensor) -> Tensor:
        """The float32 output for `inputs` [num_tokens, hidden_size]."""
        spec, num_experts = self.spec, len(self.experts)
        scores = inputs.float() @ self.router.t()
        weights, chosen = scores[:, :num_experts].softmax(-1).topk(spec.num_chosen)
        if spec.normalized:
            weights /= weights.sum(-1, keepdim=True)
        output = self._rows(inputs, chosen).mul_((weights * spec.scale)[:, :, None]).sum(1)
        if self.shared is not None:
            shared = self.shared.down(activated(self.shared, inputs)).float()
            output += shared * scores[:, num_experts:].sigmoid() if spec.has_shared_gate else shared
        return output

    def _rows(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """What a token's experts `chosen` [num_tokens, num_chosen] return, float32 [num_tokens, num_chosen, hidden]."""
        flat = chosen.flatten()
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        rows = torch.empty(len(flat), inputs.shape[1], device=inputs.device)
        for expert, places in zip(self.experts, torch.split(flat.argsort(stable=True), counts), strict=True):
            if len(places):
                rows[places] = expert.down(activated(expert, inputs[places // chosen.shape[1]])).float()
        return rows.view(*chosen.shape, -1)


def build_torch_experts(weights: ExpertWeights) -> TorchExperts:
    router, _ = weights.router.fused()
    experts = [_mlp(expert) for expert in weights.experts]
    return TorchExperts(weights.spec, router.float(), experts, None if weights.shared is None else _mlp(weights.shared))


def _mlp(weights: MlpWeights) -> TorchMlp:
    return BuiltMlp(weights.spec, make_linear(*weights.gate_up.fused()), make_linear(*weights.down.fused()))
