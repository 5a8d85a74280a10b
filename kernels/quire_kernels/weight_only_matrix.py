"""Weights in codes of 8 or 4 bits that are multiplied with numbers: `weight_only_linear`, `dequantize_weight`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels._code_words import WORDS
from quire_kernels._shapes import ceil_div, check_rows, check_vector
from quire_kernels.cpu.nibbles import E2M1_DOUBLES, GROUP_SIZES

MOST_ZERO = 64
"""The largest zero point: 128 and it are a number of bfloat16."""
_WORD_BITS = 32


class GroupScales(NamedTuple):
    """Numbers of groups: each is a float16 times a power of two of its output, so that small ones keep their bits."""

    values: Tensor
    """float16 [groups, outputs]."""
    factors: Tensor
    """float32 [outputs]."""

    def dense(self) -> Tensor:
        """float32 [groups, outputs]."""
        return self.values.float() * self.factors


class WeightOnlyMatrix(NamedTuple):
    """A weight [outputs, inputs] in codes. A number is code x scale of its output; in groups of inputs it is
    (code - zero) x scale of its group, or code x scale + minimum. Of experts, each tensor has a first dimension more.
    """

    words: Tensor
    """int32 [outputs, words]: codes of int8, or unsigned ones of 4 bits, as `pack_codes` has them."""
    bits: int
    inputs: int
    scales: Tensor
    """float32 [outputs]; in groups, factors of the groups' scales."""
    group: int | None = None
    """How many neighbouring inputs have one scale, one of GROUP_SIZES; the last group may have fewer."""
    pairs: Tensor | None = None
    """int32 [groups, outputs], in groups: a float16 each, which times the factor is the scale, and above it another. Of
    4 bits without `minimum_factors` that is the zero point, a whole number of at most MOST_ZERO.
    """
    minimum_factors: Tensor | None = None
    """float32 [outputs]: times the second number of a pair, the minimum."""
    is_e2m1: bool = False
    """Of 4 bits without zero points and minimums: whether a number is E2M1_DOUBLES[code] x scale."""

    @classmethod
    def in_groups(
        cls,
        words: Tensor,
        bits: int,
        inputs: int,
        group: int,
        scales: GroupScales,
        zeros: Tensor | None = None,
        minimums: GroupScales | None = None,
        *,
        is_e2m1: bool = False,
    ) -> "WeightOnlyMatrix":
        """With zeros, float16 [groups, outputs], minimums, or neither."""
        second = zeros if minimums is None else minimums.values
        second = torch.zeros_like(scales.values) if second is None else second
        pairs = torch.stack((scales.values, second), -1).view(torch.int32).squeeze(-1)
        factors = None if minimums is None else minimums.factors
        return cls(words, bits, inputs, scales.factors, group, pairs, factors, is_e2m1)

    @property
    def coding(self) -> None:
        """Rows that it is multiplied with are not coded."""

    @property
    def num_groups(self) -> int:
        """1 where there are none."""
        return 1 if self.group is None else ceil_div(self.inputs, self.group)

    @property
    def has_zeros(self) -> bool:
        return self.bits == 4 and self.minimum_factors is None and not self.is_e2m1

    def of_expert(self, expert: int) -> "WeightOnlyMatrix":
        def one(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[expert]

        return self._replace(
            words=self.words[expert],
            scales=self.scales[expert],
            pairs=one(self.pairs),
            minimum_factors=one(self.minimum_factors),
        )

    def dense(self) -> Tensor:
        """The numbers, float32 [outputs, inputs]."""
        codes = _unpacked(self.words, self.bits, self.inputs)
        codes = (torch.tensor(E2M1_DOUBLES, device=codes.device)[codes] if self.is_e2m1 else codes).float()
        if self.pairs is None:
            return codes * self.scales[:, None]
        groups = torch.arange(self.inputs, device=codes.device) // (self.group or self.inputs)
        halves = self.pairs.view(torch.float16).view(*self.pairs.shape, 2).float()
        scales, seconds = (halves[groups, :, place].t() for place in range(2))
        if self.has_zeros:
            codes = codes - seconds
        numbers: Tensor = codes * scales * self.scales[:, None]
        return numbers if self.minimum_factors is None else numbers + seconds * self.minimum_factors[:, None]

    def check(self) -> None:
        """Raises ValueError, which names the weight, where a shape, dtype, stride or device is wrong."""
        require(self.bits in (4, 8), "weight", "be of 4 or 8 bits")
        is_fit = not self.is_e2m1 or (self.bits == 4 and self.minimum_factors is None)
        require(is_fit, "weight", "be of 4 bits without minimums where codes are numbers of e2m1")
        check_rows(self.words, "weight", [torch.int32])
        device, (outputs, width) = self.words.device, self.words.shape
        needed = num_words(self.inputs, self.bits)
        require(width == needed, "weight", f"have words [{outputs}, {needed}], not {list(self.words.shape)}")
        check_vector(self.scales, "weight", outputs, torch.float32, device)
        if self.minimum_factors is not None:
            check_vector(self.minimum_factors, "weight", outputs, torch.float32, device)
        if self.group is None or self.pairs is None:
            neither = self.group is None and self.pairs is None
            require(neither, "weight", "have scales of groups, and their size, or neither")
            require(self.bits == 8, "weight", "have groups where codes have 4 bits")
            require(self.minimum_factors is None, "weight", "have groups where it has minimums")
        else:
            require(self.group in GROUP_SIZES, "weight", f"have groups of {GROUP_SIZES} inputs")
            shape = self.num_groups, outputs
            fits = self.pairs.shape == shape and self.pairs.dtype == torch.int32 and self.pairs.is_contiguous()
            require(fits and self.pairs.device == device, "weight", f"have int32 {list(shape)} of its groups")


def num_words(inputs: int, bits: int) -> int:
    """The words of an output: those of whole blocks of inputs."""
    return ceil_div(inputs, WORDS * (_WORD_BITS // bits)) * WORDS


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [outputs, inputs], int8, or uint8 of 4 bits, in words, int32 [outputs, words]: in each block of 256 inputs
    of 4 bits, or 128 of 8, word j has inputs j, 32 + j and so on from its lowest bits on. Codes that are missing of a
    block are 0.
    """
    outputs, inputs = codes.shape
    planes = _WORD_BITS // bits
    padded = F.pad(codes, (0, -inputs % (WORDS * planes))).view(outputs, -1, planes, WORDS)
    words = torch.zeros(outputs, padded.shape[1], WORDS, dtype=torch.int32, device=codes.device)
    for plane in range(planes):
        words |= (padded[:, :, plane].to(torch.int32) & (2**bits - 1)) << (bits * plane)
    return words.flatten(1)


def _unpacked(words: Tensor, bits: int, inputs: int) -> Tensor:
    """int32 [outputs, inputs]."""
    blocks = words.view(len(words), -1, WORDS)
    # A shift to the left and one back leave a code's sign.
    above = _WORD_BITS - bits
    planes = [(blocks << (above - bits * plane)) >> above for plane in range(_WORD_BITS // bits)]
    codes = torch.stack(planes, 2).flatten(1)[:, :inputs]
    return codes if bits == 8 else codes & 15
