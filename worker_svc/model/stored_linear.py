"""How a checkpoint stores a linear layer: the tensors of one, and its parts in them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import LinearLayer, StoredLinear
from worker_svc.model.formats.dense import DenseFormat, require_numbers
from worker_svc.model.weight_format import (
    BlockCodes,
    GroupCodes,
    SizedWeight,
    StoredWeight,
    StridedWeight,
    WeightFormat,
    block_codes,
    block_form,
    code_scales,
    float8_scales,
    group_bits,
    group_codes,
    joined_factors,
)
from worker_svc.model.weights import Checkpoint

_DENSE = DenseFormat()
_NIBBLE = 4  # bits


def layer_format(
    stored: StoredLinear, inputs: int, weight_format: WeightFormat, names: Collection[str]
) -> WeightFormat:
    """The format of one layer of a checkpoint with tensors of these names: the model's, or dense.

    Routers, heads, and layers of which quantization would cost too much quality are often stored as they were. They
    have `name`.weight and none of the other tensors of the model's format.
    """
    has_others = bool(_others(stored, inputs, weight_format))
    return _DENSE if has_others and is_stored_dense(stored, inputs, weight_format, names) else weight_format


def is_stored_dense(stored: StoredLinear, inputs: int, weight_format: WeightFormat, names: Collection[str]) -> bool:
    """Whether a checkpoint has `name`.weight of a layer, and none of the other tensors of the model's format."""
    others = _others(stored, inputs, weight_format)
    return f"{stored.name}.weight" in names and not any(other in names for other in others)


def _others(stored: StoredLinear, inputs: int, weight_format: WeightFormat) -> Collection[str]:
    """What a format has of a layer beside `name`.weight."""
    return weight_format.tensors(stored.name, sum(stored.outputs), inputs).keys() - {f"{stored.name}.weight"}


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The codes that a checkpoint has of a linear layer, as its format says before a tensor is read."""

    has_blocks: bool = False
    """Whether stored layers are in blocks."""
    has_nibbles: bool = False
    """Whether all stored layers have codes of `GroupFormat` in at most 4 bits."""
    has_bytes: bool = False
    """Whether a stored layer has codes of `GroupFormat` in more."""

    @classmethod
    def of(cls, layer: LinearLayer, weight_format: WeightFormat, names: Collection[str]) -> "StoredCodes":
        """Those of a checkpoint in a format, with tensors of these names."""
        formats = [(layer_format(stored, layer.inputs, weight_format, names), stored.name) for stored in layer.stored]
        bits = [group_bits(of_layer, name) for of_layer, name in formats]
        return cls(
            any(block_form(of_layer, name) is not None for of_layer, name in formats),
            all(each is not None and each <= _NIBBLE for each in bits),
            any(each is not None and each > _NIBBLE for each in bits),
        )

    def keeps_blocks(self, *, of_expert: bool) -> bool:
        """Whether a product keeps them as `read_blocks` reads them, with any value of QUIRE_QUANTIZATION but none.

        Experts keep codes of blocks alone, which all experts of a layer have: their products share rows.
        """
        return self.has_blocks or (self.has_bytes and not of_expert)

    def keeps_nibbles(self, *, of_expert: bool) -> bool:
        """Whether a product that may have 8 bits keeps them as `read_nibbles` reads them."""
        return self.has_nibbles and not of_expert


def _is_transposed(stored: StoredLinear, weight_format: WeightFormat) -> bool:
    """Whether the weight is [inputs, outputs]. Those in blocks are not: a block has inputs of one output."""
    return stored.transposed and block_form(weight_format, stored.name) is None


def shapes_of(stored: StoredLinear, inputs: int, weight_format: WeightFormat) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a stored layer, its bias included, by their names.

    Raises UnsupportedModel where the weight is transposed and not dense: formats state shapes [outputs, inputs].
    """
    outputs = sum(stored.outputs)
    shapes = dict(weight_format.tensors(stored.name, outputs, inputs))
    if _is_transposed(stored, weight_format):
        name = f"{stored.name}.weight"
        if shapes != {name: (outputs, inputs)}:
            raise UnsupportedModel(
                f"{name}: this architecture stores it as [inputs, outputs], which only dense weights may be; the "
                f"model's format of weights has {', '.join(sorted(shapes))}"
            )
        shapes = {name: (inputs, outputs)}
    return shapes | ({f"{stored.name}.bias": (outputs,)} if stored.bias else {})


def read_stored(checkpoint: Checkpoint, stored: StoredLinear, inputs: int) -> tuple[StoredWeight, Tensor | None]:
    """The weight and the bias of a stored layer. A bias of zeros that is not described is left unused.

    Raises UnsupportedModel if its tensors do not match.
    """
    weight_format = layer_format(stored, inputs, checkpoint.weight_format, checkpoint.names)
    shapes = shapes_of(stored, inputs, weight_format)
    tensors = {name: checkpoint.read(name, *shape) for name, shape in shapes.items()}
    bias = tensors.pop(f"{stored.name}.bias", None)
    if bias is not None:
        require_numbers(f"{stored.name}.bias", bias)
    else:
        # Earlier releases of AutoGPTQ wrote one of zeros for each layer that has none.
        checkpoint.drop_zeros(f"{stored.name}.bias")
    if _is_transposed(stored, weight_format):
        tensors = {name: tensor.t() for name, tensor in tensors.items()}
    weight = weight_format.weight(stored.name, tensors)
    expected = sum(stored.outputs), inputs
    if isinstance(weight, SizedWeight) and weight.shape != expected:
        raise UnsupportedModel(f"the weight of {stored.name} is {list(weight.shape)}, not {list(expected)}")
    return weight, bias


def weight_parts(stored: StoredLinear, weight: StoredWeight) -> Iterator[StoredWeight]:
    """The parts of a stored layer's weight, in order."""
    turn, num_parts = stored.interleaved, len(stored.outputs)
    if turn == 1 and isinstance(weight, StridedWeight):
        yield from (weight.strided(slice(part, None, num_parts)) for part in range(num_parts))
        return
    if turn is not None:
        for part in range(num_parts):
            starts = range(part * turn, sum(stored.outputs), num_parts * turn)
            yield _Ranges(weight, tuple(range(start, start + turn) for start in starts))
        return
    yield from (weight.outputs(span.start, span.stop) for span in stored.spans)


def bias_parts(stored: StoredLinear, bias: Tensor | None) -> Iterator[Tensor | None]:
    """The parts of a stored layer's bias, in order; None for each if there is none."""
    if bias is None:
        yield from (None for _ in stored.outputs)
    elif stored.interleaved is not None:
        turns = bias.view(-1, len(stored.outputs), stored.interleaved)
        yield from (turns[:, part].flatten() for part in range(len(stored.outputs)))
    else:
        yield from (bias[span.start : span.stop] for span in stored.spans)


def halves_of_neighbours(num_outputs: int, head_dim: int, rotated: int) -> Tensor:
    """The order int64 [num_outputs] in which outputs of heads, whose first `rotated` dimensions are rotated in pairs
    (2i, 2i + 1), have these pairs at (i, i + rotated / 2).
    """
    heads = torch.arange(num_outputs).view(-1, head_dim)
    pairs = heads[:, :rotated].view(len(heads), -1, 2).transpose(1, 2).flatten(1)
    return torch.cat((pairs, heads[:, rotated:]), 1).flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Reordered:
    """A `StoredWeight`: outputs of another weight in the order int64 [outputs]."""

    weight: StoredWeight
    order: Tensor

    def outputs(self, start: int, stop: int) -> "Reordered":
        order = self.order[start:stop]
        if not len(order):
            return Reordered(self.weight.outputs(0, 0), order)
        first, last = int(order.min()), int(order.max())
        return Reordered(self.weight.outputs(first, last + 1), order - first)

    def inputs(self, start: int, stop: int) -> "Reordered":
        return Reordered(self.weight.inputs(start, stop), self.order)

    def dense(self) -> Tensor:
        return self.weight.dense()[self.order]

    def code_scales(self) -> Tensor | None:
        scales = code_scales(self.weight)
        return None if scales is None else scales[self.order]

    def float8_scales(self) -> Tensor | None:
        scales = float8_scales(self.weight)
        return None if scales is None else scales[self.order]

    def group_codes(self) -> GroupCodes | None:
        found = group_codes(self.weight)
        if found is None:
            return None
        codes, zeros, scales = (each[self.order] for each in (found.codes, found.zeros, found.scales))
        return GroupCodes(codes, zeros, scales, found.groups)

    def block_codes(self) -> BlockCodes | None:
        found = block_codes(self.weight)
        if found is None:
            return None
        codes, scales = found.codes[self.order], found.scales[self.order]
        minimums, factors = (None if each is None else each[self.order] for each in (found.minimums, found.factors))
        return replace(found, codes=codes, scales=scales, minimums=minimums, factors=factors)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """A `StoredWeight`: ranges of another weight's outputs, one after another."""

    weight: StoredWeight
    ranges: tuple[range, ...]

    def outputs(self, start: int, stop: int) -> "_Ranges":
        chosen = []
        for outputs in self.ranges:
            chosen.append(outputs[max(start, 0) : max(stop, 0)])
            start, stop = start - len(outputs), stop - len(outputs)
        return _Ranges(self.weight, tuple(outputs for outputs in chosen if outputs))

    def inputs(self, start: int, stop: int) -> "_Ranges":
        return _Ranges(self.weight.inputs(start, stop), self.ranges)

    def dense(self) -> Tensor:
        return torch.cat([weight.dense() for weight in self._weights()])

    def code_scales(self) -> Tensor | None:
        found = [scales for weight in self._weights() if (scales := code_scales(weight)) is not None]
        return torch.cat(found) if found and len(found) == len(self.ranges) else None

    def float8_scales(self) -> Tensor | None:
        found = [scales for weight in self._weights() if (scales := float8_scales(weight)) is not None]
        return torch.cat(found) if found and len(found) == len(self.ranges) else None

    def group_codes(self) -> GroupCodes | None:
        found = [codes for weight in self._weights() if (codes := group_codes(weight)) is not None]
        if not found or len(found) < len(self.ranges):
            return None
        return GroupCodes(
            torch.cat([each.codes for each in found]),
            torch.cat([each.zeros for each in found]),
            torch.cat([each.scales for each in found]),
            found[0].groups,
        )

    def block_codes(self) -> BlockCodes | None:
        found = [codes for weight in self._weights() if (codes := block_codes(weight)) is not None]
        if not found or len(found) < len(self.ranges):
            return None
        least = None
        if any(each.minimums is not None for each in found):
            of_each = [torch.zeros_like(each.scales) if each.minimums is None else each.minimums for each in found]
            least = torch.cat(of_each)
        return replace(
            found[0],
            codes=torch.cat([each.codes for each in found]),
            scales=torch.cat([each.scales for each in found]),
            minimums=least,
            factors=joined_factors([(len(each.codes), each.factors) for each in found], torch.cat),
        )

    def _weights(self) -> Iterator[StoredWeight]:
        return (self.weight.outputs(outputs.start, outputs.stop) for outputs in self.ranges)
