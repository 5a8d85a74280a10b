"""The parts of a linear layer with codes that products keep: those of at most 4 bits in 4 bits, others in 8."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.cpu.grouped_bytes import BYTE_GROUP_SIZES, ByteWeight, quantize_in_bytes
from quire_kernels.cpu.nibbles import NibbleWeight
from worker_svc.model.linear_weights import WeightParts
from worker_svc.model.weight_format import BlockCodes, CodeForm, StoredWeight, block_codes, joined_factors

_NIBBLE = 4  # bits


class Codes(Protocol):
    """Codes of a part, or what is known of them before they are read."""

    @property
    def bits(self) -> int: ...

    @property
    def group(self) -> int: ...


def joined_form(parts: Sequence[Codes | None]) -> CodeForm:
    """The form that the parts of a product have together. None: a part without block codes."""
    coded = [part for part in parts if part is not None]
    in_nibbles = len(coded) == len(parts) and all(part.bits <= _NIBBLE for part in coded)
    # Sizes of groups are multiples of each other.
    return CodeForm(_NIBBLE if in_nibbles else 8, min((part.group for part in coded), default=BYTE_GROUP_SIZES[-1]))


def read_blocks(
    weights: WeightParts, join: Callable[[list[Tensor]], Tensor], *, takes_e2m1: bool = False
) -> tuple[NibbleWeight | ByteWeight, Tensor | None]:
    """A layer's weight with its own codes, and its bias; `join` joins the outputs of its parts: tensors [outputs, ...].

    All parts are in 8 bits if one needs them, and all have minimums if one has: the numbers stay the same. Only a part
    without block codes is rounded, to 8 bits. Codes of e2m1 stay in 4 bits if the product takes them, else they become
    whole numbers in 8 bits.
    """
    parts: list[BlockCodes | Tensor] = []
    biases: list[Tensor] = []

    def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
        codes = block_codes(weight)
        if codes is not None and not takes_e2m1:
            codes = codes.whole()
        parts.append(weight.dense().to(weights.code_dtype) if codes is None else codes)
        biases.append(torch.zeros(weights.outputs[part]) if bias is None else bias.float())

    weights.for_each_part(place)
    if len({isinstance(part, BlockCodes) and part.is_e2m1 for part in parts}) > 1:
        parts = [part.whole() if isinstance(part, BlockCodes) else part for part in parts]
    if len(parts) == 1 and join is torch.cat:
        join = _only  # without a copy
    bits, group = joined_form([part if isinstance(part, BlockCodes) else None for part in parts])
    joined: NibbleWeight | ByteWeight
    if bits == _NIBBLE:
        joined = _joined_nibbles([_in_groups(part, group) for part in parts if isinstance(part, BlockCodes)], join)
    else:
        joined = _joined_bytes([_bytes_of(part, group) for part in parts], join)
    return joined, join(biases) if weights.biased else None


def _only(tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _joined_nibbles(parts: list[BlockCodes], join: Callable[[list[Tensor]], Tensor]) -> NibbleWeight:
    nibbles = [_nibbles_of(part) for part in parts]
    if any(each.has_minimums for each in nibbles):
        nibbles = [each.with_minimums() for each in nibbles]
    return NibbleWeight(
        join([each.codes for each in nibbles]),
        join([each.scales for each in nibbles]),
        join([each.zeros for each in nibbles]),
        nibbles[0].group,
        has_minimums=nibbles[0].has_minimums,
        is_e2m1=parts[0].is_e2m1,
        factors=joined_factors([(len(part.codes), part.factors) for part in parts], join),
    )


def _nibbles_of(part: BlockCodes) -> NibbleWeight:
    if part.minimums is None:
        return NibbleWeight(part.codes, part.scales, torch.full_like(part.scales, part.zero), part.group)
    assert part.zero == 0, "types with minimums have no zero point"
    return NibbleWeight(part.codes, part.scales, part.minimums, part.group, has_minimums=True)


def _joined_bytes(parts: list[ByteWeight], join: Callable[[list[Tensor]], Tensor]) -> ByteWeight:
    minimums = None
    if any(part.minimums is not None for part in parts):
        minimums = join([torch.zeros_like(each.scales) if each.minimums is None else each.minimums for each in parts])
    return ByteWeight(
        join([each.codes for each in parts]),
        join([each.scales for each in parts]),
        parts[0].group,
        minimums,
        joined_factors([(len(each.codes), each.factors) for each in parts], join),
    )


def _bytes_of(part: BlockCodes | Tensor, group: int) -> ByteWeight:
    if isinstance(part, Tensor):
        return quantize_in_bytes(part, group)
    # Codes less the zero point are from -128 to 127: the bytes of the difference, without the carry.
    codes = part.codes.sub_(part.zero).view(torch.int8)
    return ByteWeight(codes, part.scales, part.group, part.minimums, part.factors).in_groups(group)


def _in_groups(part: BlockCodes, size: int) -> BlockCodes:
    """The same numbers in groups of `size` inputs, a part of the present ones."""
    if size == part.group:
        return part
    groups = torch.arange(0, part.codes.shape[1], size) // part.group
    minimums = None if part.minimums is None else part.minimums[:, groups]
    return replace(part, scales=part.scales[:, groups], minimums=minimums, group=size)
