"""Rounds weights to 4 bits by torch's operators, on any device: as `cpu.nibbles` does with compiled code."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.nibbles import GROUP_SIZES, NibbleWeight

_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of a group's range, over which codes are tried."""
_LARGEST = 15
_TINY = 1e-30
# Numbers that are rounded at once: float32 is large, and some copies are made.
_NUMBERS = 2**24


def round_to_nibbles(weight: Tensor, group: int) -> NibbleWeight:
    """Rounds a weight [outputs, inputs] of floating point as `quantize_in_nibbles` does, on its device.

    Raises:
        ValueError: there are no groups of this size.
    """
    require(group in GROUP_SIZES, "group", "be 16, 32, 64 or 128")
    outputs, inputs = weight.shape
    num_groups = -(-inputs // group)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales, zeros = (torch.empty(outputs, num_groups, device=weight.device) for _ in range(2))
    # What a last group lacks are zeros, whose errors do not count.
    is_number = (torch.arange(num_groups * group, device=weight.device) < inputs).view(num_groups, group)
    step = max(1, _NUMBERS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        numbers = F.pad(weight[rows].float(), (0, num_groups * group - inputs)).view(-1, num_groups, group)
        of_groups, scales[rows], zeros[rows] = _round(numbers, is_number)
        codes[rows] = of_groups.flatten(1)[:, :inputs]
    return NibbleWeight(codes, scales, zeros, group)


def _round(numbers: Tensor, is_number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, groups, numbers], scales and zero points [outputs, groups] of groups of numbers."""
    least = numbers.amin(-1).clamp(max=0)
    span = numbers.amax(-1).clamp(min=0) - least
    best = torch.full_like(span, torch.inf)
    scales, zeros = torch.full_like(span, torch.nan), torch.zeros_like(span)
    for part in _PARTS:
        scale = _in_11_bits((span * part / _LARGEST).clamp(min=_TINY))
        zero = _in_11_bits(-least * part / scale)
        codes = _codes(numbers, scale, zero)
        errors = (((codes - zero[..., None]) * scale[..., None] - numbers) * is_number).square().sum(-1)
        is_better = errors < best
        best = torch.where(is_better, errors, best)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    return _codes(numbers, scales, zeros).nan_to_num(0.0).to(torch.uint8), scales, zeros


def _codes(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (numbers / scales[..., None] + zeros[..., None]).round().clamp(0, _LARGEST)


def _in_11_bits(numbers: Tensor) -> Tensor:
    """As float16 has them, whatever their size."""
    mantissas, exponents = torch.frexp(numbers)
    return torch.ldexp((mantissas * 2**11).round(), exponents - 11)
