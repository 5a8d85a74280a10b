"""GGUF: blocks of codes as the file has them, in a model directory that `worker_svc.prepare` makes of it.

`types` of the quantization_config has the type of blocks of each layer that is stored so; others are dense. A layer's
tensor is `blocks`, uint8 [outputs, bytes].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire_kernels.cpu.nibbles import E2M1_DOUBLES
from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._gguf_blocks import BLOCK_TYPES, BlockType
from worker_svc.model.formats._grouped import require_dtype
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.weight_format import BlockCodes, BlockForm, StoredWeight

METHOD = "gguf"
BLOCKS = ".blocks"
_DENSE = DenseFormat()
_E2M1 = torch.tensor(E2M1_DOUBLES)
_NUMBERS = 2**22  # that are decoded at once: the steps between take several times the memory of the codes


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A `StoredWeight` of blocks."""

    layer: str
    blocks: Tensor
    """uint8 [outputs, bytes]."""
    of: BlockType

    @property
    def num_inputs(self) -> int:
        """Numbers of an output."""
        return self.blocks.shape[1] // self.of.num_bytes * self.of.numbers

    def outputs(self, start: int, stop: int) -> "BlockWeight":
        return self.strided(slice(start, stop))

    def strided(self, outputs: slice) -> "BlockWeight":
        return replace(self, blocks=self.blocks[outputs])

    def inputs(self, start: int, stop: int) -> "BlockWeight":
        if start % self.of.numbers or stop % self.of.numbers:
            raise UnsupportedModel(
                f"{self.layer}: blocks of {self.of.numbers} inputs cannot be cut into inputs {start} to {stop}"
            )
        return replace(self, blocks=self.blocks[:, self.of.row_bytes(start) : self.of.row_bytes(stop)])

    def dense(self) -> Tensor:
        weight = torch.empty(len(self.blocks), self.num_inputs)
        for rows, codes, scales, minimums in self._decoded():
            numbers = weight[rows].view(len(codes), -1, self.of.group)
            if self.of.is_e2m1:
                codes = _E2M1[codes.int()]
            numbers.copy_(codes.view(numbers.shape)).sub_(self.of.zero).mul_(scales[..., None])
            if minimums is not None:
                numbers.add_(minimums[..., None])
        return weight

    def block_codes(self) -> BlockCodes:
        num_groups = self.num_inputs // self.of.group
        codes = torch.empty(len(self.blocks), self.num_inputs, dtype=torch.uint8)
        scales = torch.empty(len(self.blocks), num_groups)
        least: Tensor | None = None
        for rows, some, of_groups, minimums in self._decoded():
            codes[rows], scales[rows] = some, of_groups
            if minimums is not None:
                least = torch.empty_like(scales) if least is None else least
                least[rows] = minimums
        return BlockCodes(codes, self.of.bits, self.of.zero, scales, least, self.of.group, is_e2m1=self.of.is_e2m1)

    def _decoded(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
        """Ranges of outputs, each with its codes, scales and minimums [outputs, ...]."""
        step = max(1, _NUMBERS // max(1, self.num_inputs))
        for start in range(0, len(self.blocks), step):
            rows = slice(start, min(start + step, len(self.blocks)))
            count = rows.stop - rows.start
            codes, scales, minimums = self.of.decode(self.blocks[rows].reshape(-1, self.of.num_bytes))
            least = None if minimums is None else minimums.reshape(count, -1)
            yield rows, codes.reshape(count, -1), scales.reshape(count, -1), least


class GgufFormat:
    """A `WeightFormat` of one tensor of blocks for each layer, or its dense weight."""

    def __init__(self, types: Mapping[str, BlockType]) -> None:
        """`types` by the names of layers."""
        self._types = types

    def read_as(self, name: str) -> str | None:
        return name

    def block_form(self, layer: str) -> BlockForm | None:
        found = self._types.get(layer)
        return None if found is None else BlockForm(found.bits, found.group, found.is_e2m1)

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        if layer not in self._types:
            return _DENSE.tensors(layer, outputs, inputs)
        return {f"{layer}{BLOCKS}": (outputs, self._types[layer].row_bytes(inputs))}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        if layer not in self._types:
            return _DENSE.weight(layer, tensors)
        blocks = tensors[f"{layer}{BLOCKS}"]
        require_dtype(f"{layer}{BLOCKS}", blocks, torch.uint8)
        return BlockWeight(layer, blocks, self._types[layer])


def _make(quantization: Mapping[str, Any]) -> GgufFormat:
    fields = Fields(quantization)
    types = {}
    for layer, name in fields.mapping("types").items():
        if not isinstance(name, str) or name not in BLOCK_TYPES:
            raise UnsupportedModel(
                f"quantization_config.types: {layer} is stored as {name!r}; the types that are read: "
                f"{', '.join(BLOCK_TYPES)}"
            )
        types[layer] = BLOCK_TYPES[name]
    return GgufFormat(types)


FORMAT = _make
