"""Orders of outputs for the compiled code, in which a panel has what is computed together: sixteen outputs of the gate
and of up of an MLP, or of the halves of a head, which are rotated against each other.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.cpu.linear import PANEL
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.weight_format import StoredWeight

# What a panel takes of gate and of up, or of a half.
_LANES = PANEL // 2


class PanelOrder(Protocol):
    """The order in which the outputs of a product's parts are joined."""

    num_outputs: int
    """Of all parts, with padding."""

    def place(self, part: int, outputs: Tensor, joined: Tensor) -> None:
        """Copies a part [outputs, ...] to its places in [num_outputs, ...], which has zeros as padding."""


class GateAndUp:
    """Sixteen outputs of the gate, then the same of up, and so on, both padded with zeros to a multiple of 32."""

    def __init__(self, width: int) -> None:
        self.num_outputs = 2 * -(-width // PANEL) * PANEL

    def place(self, part: int, outputs: Tensor, joined: Tensor) -> None:
        panels = joined.view(-1, 2, _LANES, *joined.shape[1:])[:, part]
        num_full = len(outputs) // _LANES
        panels[:num_full].copy_(outputs[: num_full * _LANES].view(num_full, _LANES, *outputs.shape[1:]))
        rest = outputs[num_full * _LANES :]
        if len(rest):
            panels[num_full, : len(rest)].copy_(rest)


class HalfHeads:
    """Queries, keys and values side by side: of each head sixteen outputs of its first half, then the same of its
    second half, and so on. For heads that are whole panels.
    """

    def __init__(self, widths: Sequence[int], head_dim: int) -> None:
        self.num_outputs, self._widths, self._head_dim = sum(widths), tuple(widths), head_dim

    @staticmethod
    def suits(head_dim: int) -> bool:
        """Whether heads of so many dimensions are whole panels."""
        return head_dim % PANEL == 0

    def place(self, part: int, outputs: Tensor, joined: Tensor) -> None:
        start, panels = sum(self._widths[:part]), self._head_dim // PANEL
        rows = joined[start : start + len(outputs)].view(-1, panels, 2, _LANES, *joined.shape[1:])
        rows.copy_(outputs.view(-1, 2, panels, _LANES, *outputs.shape[1:]).transpose(1, 2))


def join(order: PanelOrder, parts: list[Tensor]) -> Tensor:
    """Tensors [outputs, ...] of one kind, of all parts, in an order."""
    joined = parts[0].new_zeros(order.num_outputs, *parts[0].shape[1:])
    for part, tensor in enumerate(parts):
        order.place(part, tensor, joined)
    return joined


def read_joined(order: PanelOrder, weights: LinearWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """A weight, its bias, and the scales of its codes in an order, without copies of all parts."""
    joined = torch.zeros(order.num_outputs, weights.inputs, dtype=dtype)
    biases = torch.zeros(order.num_outputs, dtype=dtype) if weights.biased else None

    def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
        order.place(part, weight.dense(), joined)
        if biases is not None and bias is not None:
            order.place(part, bias, biases)

    weights.for_each_part(place)
    return joined, biases, join(order, weights.code_scales)
