"""The parts of a linear layer in 4 bits: with the codes that a checkpoint has of them, or rounded."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.cpu.nibbles import DEFAULT_GROUP, GROUP_SIZES, NibbleWeight
from worker_svc.model.linear_weights import LinearWeights
from worker_svc.model.weight_format import GroupCodes, StoredWeight, equal_groups, group_codes


def read_nibbles(
    weights: LinearWeights,
    quantize: Callable[[Tensor, int], NibbleWeight] | None,
    dtype: torch.dtype,
    join: Callable[[list[Tensor]], Tensor],
    *,
    of_expert: bool = False,
) -> tuple[NibbleWeight | Tensor, Tensor | None]:
    """A layer's weight in 4 bits, and its bias; `quantize` rounds a part in groups of a size, `join` joins the outputs
    of parts: tensors [outputs, ...]. Without `quantize`, the numbers [outputs, inputs] where a part had to be rounded.

    Stored codes of at most 4 bits stay what they are. The weight is rounded where it has none, where groups are no
    multiples of 16 inputs, and where parts have their groups in different orders. With `of_expert`, groups have 32
    inputs, in order: experts are alike.
    """
    parts: list[NibbleWeight | Tensor] = []
    biases: list[Tensor | None] = []

    def place(part: int, weight: StoredWeight, bias: Tensor | None) -> None:
        biases.append(bias)
        codes = group_codes(weight)
        kept = None if codes is None else _kept(codes)
        if kept is None or (of_expert and (kept.order is not None or kept.group < DEFAULT_GROUP)):
            parts.append(weight.dense().to(dtype))
            return
        parts.append(kept)

    weights.for_each_part(place)
    coded = [part for part in parts if isinstance(part, NibbleWeight)]
    orders = [part.order for part in coded]
    if any(not _same(order, orders[0]) for order in orders):
        parts = [part.dense().to(dtype) if isinstance(part, NibbleWeight) else part for part in parts]
        coded, orders = [], []
    if quantize is None and len(coded) < len(parts):
        numbers = [part.dense().to(dtype) if isinstance(part, NibbleWeight) else part for part in parts]
        return join(numbers), _joined_bias(weights, biases, join)
    group = min(DEFAULT_GROUP if of_expert else part.group for part in coded) if coded else DEFAULT_GROUP
    order = orders[0] if orders else None

    def nibbles(part: NibbleWeight | Tensor) -> NibbleWeight:
        if isinstance(part, NibbleWeight):
            return _in_groups(part, group)
        assert quantize is not None
        return quantize(part if order is None else part[:, order], group)

    made = [nibbles(part) for part in parts]
    joined = NibbleWeight(
        join([each.codes for each in made]),
        join([each.scales for each in made]),
        join([each.zeros for each in made]),
        group,
        order,
    )
    return joined, _joined_bias(weights, biases, join)


def _joined_bias(
    weights: LinearWeights, biases: list[Tensor | None], join: Callable[[list[Tensor]], Tensor]
) -> Tensor | None:
    if not weights.biased:
        return None
    found = zip(weights.outputs, biases, strict=True)
    return join([torch.zeros(width) if bias is None else bias.float() for width, bias in found])


def _kept(codes: GroupCodes) -> NibbleWeight | None:
    """Stored codes in groups that a product may have; None: their groups are others."""
    for order in (None, codes.groups.argsort(stable=True)):
        groups = codes.groups if order is None else codes.groups[order]
        size = equal_groups(groups, reversed(GROUP_SIZES))
        if size is not None:
            firsts = groups[::size]
            columns = codes.codes if order is None else codes.codes[:, order]
            scales, zeros = codes.scales[:, firsts].float(), codes.zeros[:, firsts].float()
            return NibbleWeight(columns, scales, zeros, size, order)
    return None


def _in_groups(weight: NibbleWeight, size: int) -> NibbleWeight:
    """The same numbers, in groups of a part of the size."""
    groups = torch.arange(0, weight.codes.shape[1], size) // weight.group
    return NibbleWeight(weight.codes, weight.scales[:, groups], weight.zeros[:, groups], size, weight.order)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)
