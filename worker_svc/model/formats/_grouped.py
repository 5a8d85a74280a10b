"""Weights of packed codes, with a scale and a zero point for each output and group of inputs: those of GPTQ and AWQ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._packing import codes_in_words, unpack
from worker_svc.model.weight_format import BlockCodes, GroupCodes, equal_groups


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A part of codes [inputs, outputs] that are packed along one dimension. Parts may begin and end within a word."""

    words: Tensor
    bits: int
    dim: int
    order: Sequence[int] | None
    start: int
    """The first code of the part along `dim`, counted from the first one in `words`."""
    stop: int

    @classmethod
    def whole(cls, words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> "PackedCodes":
        """All codes of int32 `words` [inputs, outputs], one dimension of which is packed."""
        return cls(words, bits, dim, order, 0, words.shape[dim] * 32 // bits)

    def cut(self, dim: int, start: int, stop: int) -> "PackedCodes":
        """A range of inputs (dimension 0) or outputs (dimension 1)."""
        if dim != self.dim:
            return replace(self, words=self.words.narrow(dim, start, stop - start))
        group = codes_in_words(self.bits)
        start, stop = self.start + start, self.start + stop
        first, end = start // group, -(-stop // group)
        per_group = group * self.bits // 32
        words = self.words.narrow(dim, first * per_group, (end - first) * per_group)
        return replace(self, words=words, start=start - first * group, stop=stop - first * group)

    def unpack(self) -> Tensor:
        """The codes, uint8 [inputs, outputs]."""
        return unpack(self.words, self.bits, self.dim, self.order).narrow(self.dim, self.start, self.stop - self.start)


_NIBBLE = 4  # bits
_ZERO = 128  # what codes of 8 bits are stored more than they mean


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A `StoredWeight` of packed codes: each number is (code - zero) x scale.

    It is computed in the dtype of the scales, as the formats' reference implementations do: the difference is exact,
    and the product is rounded once.
    """

    codes: PackedCodes
    zeros: Tensor
    """uint8 [groups, outputs]."""
    scales: Tensor
    """[groups, outputs]."""
    groups: Tensor
    """int64 [inputs]: the group of each input."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1], len(self.groups)

    def outputs(self, start: int, stop: int) -> "GroupedWeight":
        return replace(
            self,
            codes=self.codes.cut(1, start, stop),
            zeros=self.zeros[:, start:stop],
            scales=self.scales[:, start:stop],
        )

    def inputs(self, start: int, stop: int) -> "GroupedWeight":
        return replace(self, codes=self.codes.cut(0, start, stop), groups=self.groups[start:stop])

    def dense(self) -> Tensor:
        dtype = self.scales.dtype
        weight = self.codes.unpack().to(dtype)
        weight.sub_(self.zeros.to(dtype)[self.groups]).mul_(self.scales[self.groups])
        return weight.t()

    def code_scales(self) -> Tensor | None:
        is_coded = self.codes.bits == 8 and len(self.scales) == 1 and bool((self.zeros == _ZERO).all())
        return self.scales[0].float() if is_coded else None

    def group_codes(self) -> GroupCodes | None:
        if self.codes.bits > _NIBBLE:
            return None
        return GroupCodes(self.codes.unpack().t(), self.zeros.t(), self.scales.t(), self.groups)

    def block_codes(self) -> BlockCodes | None:
        size = equal_groups(self.groups, reversed(BYTE_GROUP_SIZES))
        if size is None:
            return None
        firsts, middle = self.groups[::size], 1 << self.codes.bits - 1
        scales, zeros = self.scales[firsts].t().float(), self.zeros[firsts].t()
        minimums = None if bool((zeros == middle).all()) else (middle - zeros.float()) * scales
        return BlockCodes(self.codes.unpack().t().contiguous(), 8, middle, scales, minimums, size)


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raises UnsupportedModel, which names the tensor, if it has none of these dtypes."""
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedModel(f"the tensor {name} is {found}, not {names}")


SCALE_DTYPES = torch.float16, torch.bfloat16, torch.float32
"""Those in which scales are stored."""
