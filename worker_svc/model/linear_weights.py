"""The tensors of one linear layer, read from a checkpoint part by part, for one of several ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.description import LinearLayer, SplitDimension, StoredLinear
from worker_svc.model.formats.dense import DenseFormat, DenseWeight
from worker_svc.model.stored_linear import (
    Reordered,
    StoredCodes,
    bias_parts,
    halves_of_neighbours,
    read_stored,
    weight_parts,
)
from worker_svc.model.weight_format import StoredWeight, code_scales, float8_scales
from worker_svc.model.weights import Checkpoint

Place: TypeAlias = Callable[[int, StoredWeight, Tensor | None], None]
"""Takes a part: its number, its weight [outputs, inputs] as it is stored, and its bias [outputs]."""
# Of queries, keys and values, the parts that are rotated.
_NUM_ROTATED = 2


class WeightParts(Protocol):
    """The weights of a linear layer, as `LinearWeights` has them."""

    layer: LinearLayer
    inputs: int
    outputs: tuple[int, ...]
    biased: bool
    code_scales: list[Tensor]
    codes: StoredCodes

    def for_each_part(self, place: Place) -> None:
        """Calls `place` for the parts in order. Each is released before the next stored layer is read."""

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype whose numbers can be rounded to codes: bfloat16 has too few bits to find those of a checkpoint."""

    def fused(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """The parts side by side, on the model's device: a weight [sum of outputs, inputs], of this dtype or else the
        model's, and a bias of the model's.

        A single part is not copied if it has that dtype and device already.
        """


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of every linear layer."""

    rank: int = 0
    num_ranks: int = 1

    def share(self, size: int, unit: int, name: str) -> slice:
        """This rank's part of a dimension, in whole units. Raises UnsupportedModel if it cannot be divided."""
        if size % (unit * self.num_ranks):
            raise UnsupportedModel(f"{name}: {size} in units of {unit} cannot be divided among {self.num_ranks} ranks")
        width = size // self.num_ranks
        return slice(self.rank * width, (self.rank + 1) * width)


WHOLE = Shard()


class LinearWeights:
    """The weights from which a backend builds one linear layer. They can be read once."""

    def __init__(self, layer: LinearLayer, checkpoint: Checkpoint, shard: Shard = WHOLE) -> None:
        """Raises UnsupportedModel where the ranks cannot share the layer."""
        self.layer = layer
        self._checkpoint = checkpoint
        split_inputs = layer.split is SplitDimension.INPUTS
        by_inputs, by_outputs = (shard, WHOLE) if split_inputs else (WHOLE, shard)
        unit = layer.split_unit
        self._inputs = by_inputs.share(layer.inputs, unit if split_inputs else 1, layer.stored[0].name)
        self._outputs = [
            by_outputs.share(width, 1 if split_inputs else unit, stored.name)
            for stored in layer.stored
            for width in stored.outputs
        ]
        self.inputs = self._inputs.stop - self._inputs.start
        self.outputs = tuple(share.stop - share.start for share in self._outputs)
        """The width of each part on this rank."""
        # Where ranks share inputs, their products are added up: the bias is in one of them.
        self.biased = layer.biased and (not split_inputs or shard.rank == 0)
        self.codes = StoredCodes.of(layer, checkpoint.weight_format, checkpoint.names)
        self.code_scales: list[Tensor] = []
        """Of each part that has been read, float32 [outputs]: see `CodedWeight`; zeros where there are none."""
        self.float8_scales: list[Tensor | None] = []
        """Of each part that has been read, float32 [outputs, groups]: see `Float8Weight`."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._checkpoint.dtype

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._checkpoint.device

    def for_each_part(self, place: Place) -> None:
        number = 0
        for stored in self.layer.stored:
            self._hand_over(stored, number, place)
            number += len(stored.outputs)

    @property
    def code_dtype(self) -> torch.dtype:
        return self.dtype if isinstance(self._checkpoint.weight_format, DenseFormat) else torch.float32

    def fused(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        device, dtype = self.device, dtype or self.dtype
        if len(self.outputs) == 1:
            parts: list[tuple[Tensor, Tensor | None]] = []
            self.for_each_part(lambda number, weight, bias: parts.append((weight.dense(), bias)))
            ((weight, bias),) = parts
            return weight.to(device, dtype).contiguous(), None if bias is None else bias.to(device, self.dtype)
        fused = torch.empty(sum(self.outputs), self.inputs, dtype=dtype, device=device)
        biases = torch.zeros(len(fused), dtype=self.dtype, device=device) if self.biased else None

        def place(number: int, weight: StoredWeight, bias: Tensor | None) -> None:
            start = sum(self.outputs[:number])
            rows = slice(start, start + self.outputs[number])
            fused[rows].copy_(weight.dense())
            if biases is not None and bias is not None:
                biases[rows].copy_(bias)

        self.for_each_part(place)
        return fused, biases

    def _hand_over(self, stored: StoredLinear, number: int, place: Place) -> None:
        weight, bias = self._read(stored)
        parts = zip(weight_parts(stored, weight), bias_parts(stored, bias), strict=True)
        for part, (part_weight, part_bias) in enumerate(parts, start=number):
            share = self._outputs[part]
            rows = part_weight.outputs(share.start, share.stop)
            bias_rows = None if part_bias is None else part_bias[share]
            if self.layer.rotated_neighbours is not None and part < _NUM_ROTATED:
                order = halves_of_neighbours(self.outputs[part], self.layer.split_unit, self.layer.rotated_neighbours)
                rows, bias_rows = Reordered(rows, order), None if bias_rows is None else bias_rows[order]
            scales = code_scales(rows)
            self.code_scales.append(torch.zeros(self.outputs[part]) if scales is None else scales)
            self.float8_scales.append(float8_scales(rows))
            place(part, rows, bias_rows)

    def _read(self, stored: StoredLinear) -> tuple[StoredWeight, Tensor | None]:
        """The weight of a stored layer, cut to this rank's inputs, and its bias."""
        weight, bias = read_stored(self._checkpoint, stored, self.layer.inputs)
        if self.inputs != self.layer.inputs:
            weight = weight.inputs(self._inputs.start, self._inputs.stop)
        return weight, bias if self.biased else None


class TiedWeights:
    """The weight of a head that is the embedding too; otherwise as `LinearWeights`."""

    def __init__(self, layer: LinearLayer, embedding: Tensor, stored: StoredWeight | None) -> None:
        """`embedding` is this rank's part, in the model's dtype and on its device, and `stored` what it was made of, if
        it was not dense.
        """
        self.layer = layer
        self.inputs = layer.inputs
        self.outputs: tuple[int, ...] = (len(embedding),)
        self.biased = False
        self.code_scales: list[Tensor] = []
        self.codes = StoredCodes(has_blocks=stored is not None)
        self._embedding, self._stored = embedding, stored

    def for_each_part(self, place: Place) -> None:
        place(0, DenseWeight(self._embedding) if self._stored is None else self._stored, None)

    @property
    def code_dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def fused(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        return self._embedding.to(dtype or self._embedding.dtype), None
