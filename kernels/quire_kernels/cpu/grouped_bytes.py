"""Weights in 8 bits, in groups of inputs with a scale for each output, and a minimum where a format has one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels._checks import require

BYTE_GROUP_SIZES = (16, 32)
"""Inputs that may have one scale."""
# Outputs that are rounded at once: float32 is large.
_ROWS = 256


@dataclass(frozen=True, eq=False)
class ByteWeight:
    """A weight [outputs, inputs] of codes: each number is code x scale, or code x scale + minimum, times a factor."""

    codes: Tensor
    """int8 [outputs, inputs]."""
    scales: Tensor
    """float32 [outputs, groups]."""
    group: int
    """How many inputs have one scale, one of BYTE_GROUP_SIZES; the last group may have fewer."""
    minimums: Tensor | None = None
    """float32 [outputs, groups]; None: there are none."""
    factors: Tensor | None = None
    """float32 [outputs]; None: 1."""

    def dense(self) -> Tensor:
        """The numbers, float32 [outputs, inputs]."""
        groups = torch.arange(self.codes.shape[1]) // self.group
        numbers = self.codes * self.scales[:, groups]
        if self.minimums is not None:
            numbers += self.minimums[:, groups]
        return numbers if self.factors is None else numbers * self.factors[:, None]

    def in_groups(self, size: int) -> "ByteWeight":
        """The same numbers in groups of `size` inputs, a part of the present ones."""
        if size == self.group:
            return self
        groups = torch.arange(0, self.codes.shape[1], size) // self.group
        minimums = None if self.minimums is None else self.minimums[:, groups]
        return ByteWeight(self.codes, self.scales[:, groups], size, minimums, self.factors)


def quantize_in_bytes(weight: Tensor, group: int = BYTE_GROUP_SIZES[-1]) -> ByteWeight:
    """Rounds a weight [outputs, inputs] to 255 steps between the largest of each group and its negative. A group with a
    number that is not finite has a scale that is not.
    """
    require(group in BYTE_GROUP_SIZES, "group", "be 16 or 32")
    outputs, inputs = weight.shape
    num_groups = -(-inputs // group)
    codes, scales = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, num_groups)
    for start in range(0, outputs, _ROWS):
        rows = slice(start, start + _ROWS)
        padded = torch.nn.functional.pad(weight[rows].float(), (0, num_groups * group - inputs))
        values = padded.view(-1, num_groups, group)
        # Of 11 bits, as scales are packed.
        steps = (values.abs().amax(2) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        mantissas, exponents = torch.frexp(steps)
        steps = torch.ldexp((mantissas * 2**11).round_(), exponents - 11)
        scales[rows] = steps
        codes[rows] = (values / steps[..., None]).round_().clamp_(-127, 127).flatten(1)[:, :inputs]
    return ByteWeight(codes, scales, group)
