"""Orders of outputs for the compiled code, in which a panel has what is computed together: sixteen outputs of the gate
and of up of an MLP, or of the halves of a head, which are rotated against each other.
"""

import torch
from torch import Tensor

from quire_kernels.cpu.linear import PANEL
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.weight_format import StoredWeight

# What a panel takes of gate and of up, or of a half.
_LANES = PANEL // 2


def interleaved(weights: LinearWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sixteen outputs of the gate, then the same of up, and so on, both padded with zeros to a multiple of 32.

    The same of the bias, and of the scales of codes.
    """
    num_panels = 2 * -(-weights.outputs[0] // PANEL)
    both = torch.zeros(num_panels, 2, _LANES, weights.inputs, dtype=dtype)
    biases = torch.zeros(num_panels, 2, _LANES, dtype=dtype) if weights.biased else None

    def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
        _copy_by_panels(weight.dense(), both[:, part])
        if biases is not None and bias is not None:
            _copy_by_panels(bias, biases[:, part])

    weights.for_each_part(place)
    scales = torch.zeros(num_panels, 2, _LANES)
    for part, of_part in enumerate(weights.code_scales):
        _copy_by_panels(of_part, scales[:, part])
    return both.flatten(0, 2), None if biases is None else biases.flatten(), scales.flatten()


def joined_by_panels(parts: list[Tensor]) -> Tensor:
    """As `interleaved`, of one kind of tensors [outputs, ...] of the gate and of up."""
    num_panels = 2 * -(-len(parts[0]) // PANEL)
    both = parts[0].new_zeros(num_panels, 2, _LANES, *parts[0].shape[1:])
    for part, tensor in enumerate(parts):
        _copy_by_panels(tensor, both[:, part])
    return both.flatten(0, 2)


def _copy_by_panels(part: Tensor, panels: Tensor) -> None:
    """Rows [width, ...] into [num_panels, lanes, ...], the last of which may not be full."""
    num_full = len(part) // _LANES
    panels[:num_full].copy_(part[: num_full * _LANES].view(num_full, _LANES, *part.shape[1:]))
    rest = part[num_full * _LANES :]
    if len(rest):
        panels[num_full, : len(rest)].copy_(rest)


def can_pair_halves(head_dim: int) -> bool:
    """Whether heads of so many dimensions are whole panels, so that `joined_by_half_heads` can be used."""
    return head_dim % PANEL == 0


def paired_halves(weights: LinearWeights, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Queries, keys and values side by side: of each head sixteen outputs of its first half, then the same of its
    second half, and so on.

    The same of the bias, and of the scales of codes.
    """
    joined = torch.empty(sum(weights.outputs), weights.inputs, dtype=dtype)
    biases = torch.zeros(len(joined), dtype=dtype) if weights.biased else None

    def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
        start = sum(weights.outputs[:part])
        rows = slice(start, start + weights.outputs[part])
        _copy_by_half_heads(head_dim, weight.dense(), joined[rows])
        if biases is not None and bias is not None:
            _copy_by_half_heads(head_dim, bias, biases[rows])

    weights.for_each_part(place)
    return joined, biases, joined_by_half_heads(head_dim, weights.code_scales)


def joined_by_half_heads(head_dim: int, parts: list[Tensor]) -> Tensor:
    """As `paired_halves`, of one kind of tensors [outputs, ...] of queries, keys and values."""
    joined = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for part, rows in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        _copy_by_half_heads(head_dim, part, rows)
    return joined


def _copy_by_half_heads(head_dim: int, part: Tensor, to: Tensor) -> None:
    panels = head_dim // PANEL
    halves = part.view(-1, 2, panels, _LANES, *part.shape[1:])
    to.view(-1, panels, 2, _LANES, *to.shape[1:]).copy_(halves.transpose(1, 2))
