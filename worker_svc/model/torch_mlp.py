"""An MLP by torch's operators."""

from typing import TypeAlias

from torch import Tensor

from worker_svc.model.building import BuiltMlp
from worker_svc.model.description import Activation, MlpKind
from worker_svc.model.linear import ACTIVATIONS, Linear

TorchMlp: TypeAlias = BuiltMlp[Linear]


def activated(mlp: TorchMlp, inputs: Tensor) -> Tensor:
    """What the last product of an MLP takes, [num_tokens, width], for `inputs` [num_tokens, hidden_size]."""
    product = mlp.gate_up(inputs)
    if mlp.spec.kind is MlpKind.PLAIN:
        return ACTIVATIONS[mlp.spec.activation](product)
    # A gated linear unit (arXiv:2002.05202)
    gate, up = product.chunk(2, -1)
    if mlp.spec.activation is Activation.SWIGLU_OAI:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (gate * 1.702).sigmoid_().mul_(gate).mul_(up.add_(1.0))
    return ACTIVATIONS[mlp.spec.activation](gate).mul_(up)
