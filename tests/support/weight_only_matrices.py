"""Weights in codes for the kernels that multiply or dequantize them."""

from dataclasses import replace

import torch
from torch import Tensor

from nibble_weights import weight_of, with_minimums
from quire_kernels.cpu.nibbles import NibbleWeight, split_scales
from quire_kernels.weight_only_matrix import GroupScales, WeightOnlyMatrix, pack_codes

KINDS = ["int8", "int8 in groups", "int8 with minimums", "4 bits", "4 bits with minimums", "4 bits of e2m1"]


def _scales(of_groups: Tensor, device: str) -> GroupScales:
    values, factors = split_scales(of_groups)
    return GroupScales(values.t().contiguous().to(device), factors.to(device))


def in_4_bits(weight: NibbleWeight, device: str) -> WeightOnlyMatrix:
    has_zeros = not weight.has_minimums and not weight.is_e2m1
    zeros = weight.zeros.half().t().contiguous().to(device) if has_zeros else None
    minimums = _scales(weight.zeros, device) if weight.has_minimums else None
    words, scales = pack_codes(weight.codes, 4).to(device), _scales(weight.scales, device)
    return WeightOnlyMatrix.in_groups(
        words, 4, weight.codes.shape[1], weight.group, scales, zeros, minimums, is_e2m1=weight.is_e2m1
    )


def matrix_of(kind: str, inputs: int, outputs: int, group: int, device: str) -> WeightOnlyMatrix:
    torch.manual_seed(0)
    if kind.startswith("4 bits"):
        weight = (with_minimums if "minimums" in kind else weight_of)(outputs, inputs, group)
        if "e2m1" in kind:
            weight = replace(weight, zeros=torch.zeros_like(weight.zeros), is_e2m1=True)
        return in_4_bits(weight, device)
    words = pack_codes(torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), 8).to(device)
    if kind == "int8":
        return WeightOnlyMatrix(words, 8, inputs, torch.rand(outputs).to(device) / 128)
    of_groups = torch.rand(outputs, -(-inputs // group)) / 128
    minimums = _scales(of_groups - 0.5, device) if "minimums" in kind else None
    return WeightOnlyMatrix.in_groups(words, 8, inputs, group, _scales(of_groups, device), None, minimums)
