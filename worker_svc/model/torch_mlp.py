"""An MLP by torch's operators."""

from typing import TypeAlias

from torch import Tensor

from worker_svc.model.building import BuiltMlp
from worker_svc.model.description import MlpKind
from worker_svc.model.linear import ACTIVATIONS, Linear

TorchMlp: TypeAlias = BuiltMlp[Linear]


def activated(mlp: TorchMlp, inputs: Tensor) -> Tensor:
    """What the last product of an MLP takes, [num_tokens, width], for `inputs` [num_tokens, hidden_size]."""
    activation, product = ACTIVATIONS[mlp.spec.activation], mlp.gate_up(inputs)
    if mlp.spec.kind is MlpKind.PLAIN:
        return activation(product)
    # A gated linear unit (arXiv:2002.05202)
    gate, up = product.chunk(2, -1)
    return activation(gate).mul_(up)
