"""Weights in 4 bits, in groups of inputs with a scale and a zero point, or a minimum, for each output."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.thread_pool import ThreadPool, type_of

GROUP_SIZES = (16, 32, 64, 128)
"""Inputs that may have one scale."""
E2M1_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of the codes of e2m1, as MXFP4 has them: whole ones."""
DEFAULT_GROUP = 32
"""Inputs that have one scale where a weight is rounded."""


@dataclass(frozen=True, eq=False)
class NibbleWeight:
    """A weight [outputs, inputs] of codes: each number is (code - zero) x scale, or code x scale + minimum, times a
    factor.
    """

    codes: Tensor
    """uint8 [outputs, inputs], at most 15; the column of input `order[i]` is i."""
    scales: Tensor
    """float32 [outputs, groups]."""
    zeros: Tensor
    """float32 [outputs, groups]: zero points, exact in float16; with `has_minimums`, minimums."""
    group: int
    """How many columns have one scale, one of GROUP_SIZES; the last group may have fewer."""
    order: Tensor | None = None
    """int64 [inputs], a permutation; None: columns are in order."""
    has_minimums: bool = False
    is_e2m1: bool = False
    """Whether each number is E2M1_DOUBLES[code] x scale; `zeros` are 0 then."""
    factors: Tensor | None = None
    """float32 [outputs]; None: 1."""

    def dense(self) -> Tensor:
        """The numbers, float32 [outputs, inputs]."""
        groups = torch.arange(self.codes.shape[1]) // self.group
        scales, zeros = self.scales[:, groups], self.zeros[:, groups]
        codes = torch.tensor(E2M1_DOUBLES)[self.codes.int()] if self.is_e2m1 else self.codes
        numbers = codes * scales + zeros if self.has_minimums else (codes - zeros) * scales
        numbers = numbers if self.factors is None else numbers * self.factors[:, None]
        return numbers if self.order is None else numbers[:, self.order.argsort()]

    def with_minimums(self) -> "NibbleWeight":
        """The same numbers with minimums. A zero point of more than a few bits changes in its last bits when packed."""
        if self.has_minimums:
            return self
        return replace(self, zeros=-self.zeros * self.scales, has_minimums=True)


def quantize_in_nibbles(thread_pool: ThreadPool, weight: Tensor, group: int = DEFAULT_GROUP) -> NibbleWeight:
    """Rounds a weight [outputs, inputs] of float32 or bfloat16 to 16 steps in each group, with 0 between the first and
    the last: over the whole range of the group's numbers or a part of it, whatever has the least squared error. A group
    with a number that is not finite has the scale NaN.
    """
    require(group in GROUP_SIZES, "group", "be 16, 32, 64 or 128")
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    num_groups = -(-inputs // group)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales, zeros = torch.empty(outputs, num_groups), torch.empty(outputs, num_groups)
    thread_pool.library.quire_quantize_nibbles(
        thread_pool.handle,
        type_of(weight.dtype),
        weight.data_ptr(),
        outputs,
        inputs,
        group,
        *(each.data_ptr() for each in (codes, scales, zeros)),
    )
    return NibbleWeight(codes, scales, zeros, group)


def split_scales(scales: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales [outputs, groups] as float16 ones, and what each output's are multiplied by, float32 [outputs]: a power of
    two, times `factors` [outputs] if given.

    The largest of an output is between 2**14 and 2**15: those down to 2**-28 of it have all bits of float16. An output
    with a scale that is not finite is NaN.
    """
    peaks = scales.abs().amax(1)
    _, exponents = torch.frexp(torch.where(peaks > 0, peaks, torch.ones_like(peaks)))
    powers = torch.ldexp(torch.ones_like(peaks), exponents - 15).masked_fill(~peaks.isfinite(), torch.nan)
    return (scales / powers[:, None]).half(), powers if factors is None else powers * factors
