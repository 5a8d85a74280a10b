"""Weights in groups of 4 and 8 bits for tests, and what their products in 8 bits come to."""

from dataclasses import replace

import torch
from torch import Tensor

from quire_kernels.cpu.grouped_bytes import ByteWeight
from quire_kernels.cpu.nibbles import NibbleWeight


def weight_of(outputs: int, inputs: int, group: int, *, ordered: bool = True, symmetric: bool = False) -> NibbleWeight:
    """Codes, scales that are exact in float16, and zero points."""
    num_groups = -(-inputs // group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs, num_groups) + 0.01).half().float()
    zeros = torch.full_like(scales, 8.0) if symmetric else torch.randint(0, 16, scales.shape).float()
    return NibbleWeight(codes, scales, zeros, group, None if ordered else torch.randperm(inputs))


def with_minimums(outputs: int, inputs: int, group: int) -> NibbleWeight:
    """Codes, and scales and minimums that are exact in float16."""
    weight = weight_of(outputs, inputs, group)
    return replace(weight, zeros=torch.randn(weight.scales.shape).half().float(), has_minimums=True)


def bytes_of(outputs: int, inputs: int, group: int, *, minimums: bool = False) -> ByteWeight:
    """Codes of 8 bits, and scales of both signs and minimums that are exact in float16."""
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    scales = (torch.randn(outputs, -(-inputs // group)) / 16).half().float()
    return ByteWeight(codes, scales, group, torch.randn(scales.shape).half().float() if minimums else None)


def rounded(rows: Tensor, weight: NibbleWeight | ByteWeight) -> Tensor:
    """Each group of a row in 255 steps between the largest and its negative, float64."""
    known = weight.order if isinstance(weight, NibbleWeight) else None
    order = torch.arange(rows.shape[1]) if known is None else known
    numbers = rows.float()[:, order]
    padded = torch.nn.functional.pad(numbers, (0, -rows.shape[1] % weight.group))
    groups = padded.view(len(rows), padded.shape[1] // weight.group, weight.group)
    peaks = groups.abs().amax(2, keepdim=True).clamp(min=1e-30)
    codes = (groups * (torch.full_like(peaks, 127) / peaks)).round()
    return (codes.double() * (peaks / 127).double()).flatten(1)[:, : rows.shape[1]][:, order.argsort()]
