"""The tensors of a model directory, made of those of a GGUF file when they are written."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    dequantize,
    get_tensor_name_map,
)
from torch import Tensor

from svc_common.preparation import PreparationFailed
from worker_svc.gguf.architecture import GgufArchitecture, Join
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.parts import ModelParts
from worker_svc.model.formats._gguf_blocks import BLOCK_TYPES
from worker_svc.model.formats.gguf import BLOCKS
from worker_svc.tensor_writer import PlannedTensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER = re.compile(r"\w+\.(?:layers|h)\.(\d+)\.(.*)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_GATE_OR_UP = re.compile(r"\.experts\.(gate|up)_proj\.weight$")
_WEIGHT = ".weight"
# What is added to choose experts, whatever transformers calls its module.
_CHOICE_BIAS = "e_score_correction_bias"


class TensorPlan:
    """Raises PreparationFailed for a tensor that is missing, has another shape, or cannot be read."""

    def __init__(
        self,
        reader: GGUFReader,
        metadata: GgufMetadata,
        architecture: GgufArchitecture,
        parts: ModelParts,
        *,
        keeps_blocks: bool,
    ) -> None:
        """Without `keeps_blocks`, all tensors are float32."""
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self._architecture, self._model = architecture, parts
        self._keeps_blocks, self._num_blocks = keeps_blocks, metadata.num_blocks
        # The package does not know an architecture of another package: its names are Llama's then.
        by_name = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        number = by_name.get(metadata.architecture, MODEL_ARCH.LLAMA)
        self._names = get_tensor_name_map(number, metadata.num_blocks)
        self._heads = dict(self._heads_of_neighbours()) if architecture.has_rotated_neighbours else {}
        self._parts = dict(self._parts_of_qkv())
        self._turns = dict(self._turns_of_rows())
        self.types: dict[str, str] = {}
        """The types of layers in blocks."""
        self.dequantized: Counter[str] = Counter()
        """How many tensors of a type are dequantized, of those that could stay in other types."""
        self.read: set[str] = set()
        """The tensors of the file that are part of the model, or that it does not need."""

    def tensors(self) -> Iterator[tuple[str, PlannedTensor]]:
        """By their names."""
        self._leave_out()
        for name, shape in self._model.shapes.items():
            yield self._planned(name, shape, may_have_blocks=name in self._model.tables)
        for layer in self._model.linear_layers:
            for stored in layer.stored:
                outputs = sum(stored.outputs)
                yield self._planned(
                    f"{stored.name}{_WEIGHT}",
                    (outputs, layer.inputs),
                    may_have_blocks=True,
                    is_transposed=stored.transposed,
                )
                if stored.bias:
                    yield self._planned(f"{stored.name}.bias", (outputs,), may_have_blocks=False, may_be_missing=True)

    def _leave_out(self) -> None:
        """Counts as read what the model does not need."""
        # Of layers that share keys and values, a file may have such tensors all the same.
        unused = (self._names.get_name(prefix.removesuffix(".")) for prefix in self._model.unused_prefixes)
        self.read |= {f"{name}{_WEIGHT}" for name in unused if name is not None}
        # Blocks behind the last layer predict further tokens.
        predicting = range(len(self._model.qkv), self._num_blocks)
        for name in self._stored:
            if (block := _BLOCK.match(name)) is not None and int(block[1]) in predicting:
                self.read.add(name)

    def _heads_of_neighbours(self) -> Iterator[tuple[str, int]]:
        """The number of heads in tensors of queries and keys."""
        for qkv, counts in zip(self._model.qkv, self._model.heads, strict=True):
            for stored, count in zip(qkv.stored, counts, strict=False):
                yield f"{stored.name}{_WEIGHT}", count
                yield f"{stored.name}.bias", count

    def _turns_of_rows(self) -> Iterator[tuple[str, "_Turns"]]:
        """Of tensors whose parts take turns in transformers: in files, each part is whole."""
        for layer in self._model.linear_layers:
            for stored in layer.stored:
                if stored.interleaved is not None:
                    turns = _Turns(len(stored.outputs), stored.interleaved)
                    yield from ((f"{stored.name}{kind}", turns) for kind in (_WEIGHT, ".bias"))

    def _parts_of_qkv(self) -> Iterator[tuple[str, tuple[str, slice]]]:
        """Where queries, keys and values are if a file has one tensor of them."""
        for number, qkv in enumerate(self._model.qkv):
            first = 0
            for stored in qkv.stored:
                end = first + sum(stored.outputs)
                for kind in (_WEIGHT, ".bias"):
                    yield f"{stored.name}{kind}", (f"blk.{number}.attn_qkv{kind}", slice(first, end))
                first = end

    def _planned(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        may_have_blocks: bool,
        may_be_missing: bool = False,
        is_transposed: bool = False,
    ) -> tuple[str, PlannedTensor]:
        """`may_be_missing`: whether it is zeros then."""
        source = self._source(name, may_be_missing=may_be_missing)
        if source is None:
            return name, PlannedTensor(torch.float32, shape, partial(torch.zeros, shape))
        self.read |= {tensor.name for tensor in source.tensors}
        kind, *others = sorted({tensor.tensor_type.name for tensor in source.tensors})
        keeps_blocks = self._keeps_blocks and may_have_blocks and source.keeps_rows
        made = _Made(source, shape, self._heads.get(name), self._turns.get(name), self._model.offsets.get(name, 0.0))
        made.check(" and ".join(tensor.name for tensor in source.tensors))
        if keeps_blocks and not others and kind in BLOCK_TYPES:
            layer = name.removesuffix(_WEIGHT)
            self.types[layer] = kind
            blocks = (shape[0], BLOCK_TYPES[kind].row_bytes(shape[1]))
            return f"{layer}{BLOCKS}", PlannedTensor(torch.uint8, blocks, made.blocks)
        dtype = _FLOATS.get(kind, torch.float32)
        if others or not self._keeps_blocks or name in self._model.offsets:
            dtype = torch.float32
        for tensor in source.tensors:
            if tensor.tensor_type.name not in _FLOATS:
                self._check_readable(tensor)
                could_stay = may_have_blocks or tensor.tensor_type.name not in BLOCK_TYPES
                self.dequantized[tensor.tensor_type.name] += source.keeps_rows and could_stay
        shape = tuple(reversed(shape)) if is_transposed else shape
        return name, PlannedTensor(dtype, shape, partial(made.numbers, dtype, is_transposed=is_transposed))

    def _source(self, name: str, *, may_be_missing: bool) -> "_Source | None":
        """None: it is missing, and may be."""
        expert = _EXPERT.search(name)
        number = None if expert is None else int(expert[1])
        of_all = _EXPERT.sub(".experts.", name)
        match = _LAYER.fullmatch(of_all)
        prefix, rest = ("", of_all) if match is None else (f"blk.{match[1]}.", match[2])
        in_file = self._name_of(of_all, prefix, rest)
        joined = self._architecture.joined.get(rest)
        parts = [] if joined is None else [f"{prefix}{part}" for part in joined.names]
        if in_file in self._stored:
            self.read |= self._stored.keys() & set(parts)  # the same numbers once more
            return _Source((self._stored[in_file],), number)
        if joined is not None and all(part in self._stored for part in parts):
            return _Source(tuple(self._stored[part] for part in parts), number, None, joined.join, joined.keeps_rows)
        if (half := _GATE_OR_UP.search(of_all)) is not None:
            fused = self._name_of(_GATE_OR_UP.sub(".experts.gate_up_proj.weight", of_all), prefix, "")
            if (tensor := self._stored.get(fused)) is not None:
                rows = int(tensor.shape[-2]) // 2
                place = ("gate", "up").index(half[1])
                return _Source((tensor,), number, slice(place * rows, (place + 1) * rows))
        in_qkv, rows_of_qkv = self._parts.get(name, ("", None))
        if in_qkv in self._stored:
            return _Source((self._stored[in_qkv],), None, rows_of_qkv)
        if may_be_missing:
            return None
        raise PreparationFailed(f"the GGUF file has no tensor {in_file}, which is {name}")

    def _name_of(self, name: str, prefix: str, rest: str) -> str:
        """What the file calls a tensor, which is `rest` in the layer whose tensors begin with `prefix`."""
        if rest in self._architecture.names:
            return f"{prefix}{self._architecture.names[rest]}"
        if name.endswith(_CHOICE_BIAS):
            return f"{prefix}exp_probs_b.bias"
        layer, _, kind = name.removeprefix(self._model.prefix).rpartition(".")
        return f"{self._names.get_name(layer)}.{kind}"

    def _check_readable(self, tensor: Any) -> None:
        kind: GGMLQuantizationType = tensor.tensor_type
        if kind.name in self.dequantized:
            return
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise PreparationFailed(
                f"the tensor {tensor.name} of the GGUF file is stored as {kind.name}, which is not read; a file with "
                f"the types {', '.join((*_FLOATS, *BLOCK_TYPES))} is"
            ) from None


class _Turns(NamedTuple):
    """How parts of a tensor take turns."""

    num_parts: int
    num_rows: int
    """Of a part, in each turn."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What of a file a tensor is made of."""

    tensors: tuple[Any, ...]
    """The reader's."""
    expert: int | None
    """Its place in their first dimension; None: they have no such dimension."""
    rows: slice | None = None
    """Of the one tensor; None: all, and of each of several."""
    join: Join | None = None
    keeps_rows: bool = True

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Of one of them, or of its part of the expert."""
        shape = tuple(reversed([int(size) for size in tensor.shape]))
        return shape if self.expert is None else shape[1:]

    def data(self, tensor: Any) -> Any:
        """The bytes or numbers that are read, as NumPy has them."""
        return self.part(tensor.data if self.expert is None else tensor.data[self.expert])

    def part(self, data: Any) -> Any:
        """The rows of a tensor."""
        return data if self.rows is None else data[self.rows]


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of the model directory."""

    source: _Source
    shape: tuple[int, ...]
    heads: int | None
    """Rows of each of so many heads are in the order of llama.cpp; None: all are where they belong."""
    turns: _Turns | None
    """How the parts that the file has one after another take turns; None: they do not."""
    offset: float
    """What is subtracted."""

    def check(self, label: str) -> None:
        """Raises PreparationFailed if the tensors of the file have other shapes."""
        shapes = [self.source.shape(tensor) for tensor in self.source.tensors]
        try:
            made = self._made([self.source.part(torch.empty(shape, device="meta")) for shape in shapes])
            found = tuple(made.shape)
        except RuntimeError:  # they cannot be joined
            found = None
        # A vector may stand for a matrix of one row, and the reverse.
        if found is None or _without_leading_ones(found) != _without_leading_ones(self.shape):
            is_or_are = "is" if len(shapes) == 1 else "are"
            sizes = " and ".join(str(list(shape)) for shape in ([found] if found and len(shapes) == 1 else shapes))
            raise PreparationFailed(f"the tensor {label} of the GGUF file {is_or_are} {sizes}, not {list(self.shape)}")

    def blocks(self) -> Tensor:
        parts = [torch.from_numpy(np.array(self.source.data(tensor))) for tensor in self.source.tensors]
        return self._made(parts).view(self.shape[0], -1)

    def numbers(self, dtype: torch.dtype, *, is_transposed: bool = False) -> Tensor:
        made = self._made([self._numbers_of(tensor, dtype) for tensor in self.source.tensors])
        made = (made - self.offset if self.offset else made).reshape(self.shape)
        return made.t() if is_transposed else made

    def _numbers_of(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        data, kind = self.source.data(tensor), tensor.tensor_type.name
        if kind == "BF16":
            return torch.from_numpy(np.array(data.view(np.int16))).view(torch.bfloat16).to(dtype)
        if kind not in _FLOATS:
            data = dequantize(data, tensor.tensor_type)
        return torch.from_numpy(np.array(data)).to(dtype)

    def _made(self, parts: list[Tensor]) -> Tensor:
        made = parts[0] if self.source.join is None else self.source.join(parts)
        if self.heads is not None:
            pairs = made.reshape(self.heads, -1, 2, *made.shape[1:])
            made = pairs.transpose(1, 2).reshape(made.shape)
        if self.turns is not None:
            rows = made.reshape(self.turns.num_parts, -1, self.turns.num_rows, *made.shape[1:])
            made = rows.transpose(0, 1).reshape(made.shape)
        return made


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dropwhile(lambda size: size == 1, shape))
