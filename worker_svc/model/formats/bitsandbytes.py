"""bitsandbytes: codes of 4 bits (nf4, fp4) in blocks of neighbouring numbers, or of 8 with a scale for each output.

Source: bitsandbytes 0.50.2, `bitsandbytes/functional.py` (`QuantState`, `dequantize_4bit`) and `Linear8bitLt` of
`bitsandbytes/nn/modules.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import SCALE_DTYPES, require_dtype
from worker_svc.model.formats._scaled import ScaledWeight, blocks
from worker_svc.model.formats.dense import DenseWeight

_ANY = (-1,)  # how many numbers there are follows from sizes that the tensor `quant_state` has
_LARGEST = 127  # what codes of 8 bits are divided by
_BY_OUTPUTS = 0  # of orders of codes of 8 bits


@dataclass(frozen=True, slots=True)
class _Int8Format:
    """A `WeightFormat` of three tensors for each layer: `weight`, `SCB`, the largest number of each output, and
    `weight_format`, the order of codes.
    """

    def read_as(self, name: str) -> str | None:
        return name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return {f"{layer}.weight": (outputs, inputs), f"{layer}.SCB": (outputs,), f"{layer}.weight_format": ()}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> ScaledWeight:
        codes, largest = tensors[f"{layer}.weight"], tensors[f"{layer}.SCB"]
        require_dtype(f"{layer}.weight", codes, torch.int8)
        require_dtype(f"{layer}.SCB", largest, torch.float32)
        if int(order := tensors[f"{layer}.weight_format"]) != _BY_OUTPUTS:
            raise UnsupportedModel(
                f"the tensor {layer}.weight_format is {int(order)}, not {_BY_OUTPUTS}: codes in another order than "
                "output by output are not read"
            )
        scales = largest.view(-1, 1) / _LARGEST
        return ScaledWeight(codes, scales, None, blocks(len(codes), 1), blocks(codes.shape[1], None))


@dataclass(frozen=True, slots=True)
class _NibbleFormat:
    """A `WeightFormat` of four or six tensors for each layer: codes, the largest number of each block, what codes mean,
    and sizes as JSON. The largest numbers may have codes of their own.

    Blocks do not end with outputs, and codes mean no multiples of a number: layers are unpacked when they are read.
    """

    kind: str
    """nf4 or fp4."""
    is_nested: bool
    """Whether the largest numbers of blocks are codes of 8 bits."""

    def read_as(self, name: str) -> str | None:
        return name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        weight = f"{layer}.weight"
        shapes: dict[str, tuple[int, ...]] = {
            weight: (-(-outputs * inputs // 2),),
            f"{weight}.absmax": _ANY,
            f"{weight}.quant_map": (16,),
            f"{weight}.quant_state.bitsandbytes__{self.kind}": _ANY,
        }
        nested: dict[str, tuple[int, ...]] = {f"{weight}.nested_absmax": _ANY, f"{weight}.nested_quant_map": (256,)}
        return shapes | nested if self.is_nested else shapes

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> DenseWeight:
        found = {name.removeprefix(f"{layer}.weight").removeprefix("."): each for name, each in tensors.items()}
        state = _state(layer, found.pop(f"quant_state.bitsandbytes__{self.kind}"))
        require_dtype(f"{layer}.weight", found[""], torch.uint8)
        largest = found["absmax"]
        if self.is_nested:
            require_dtype(f"{layer}.weight.absmax", largest, torch.uint8)
            nested = _decoded(layer, largest, found["nested_quant_map"], found["nested_absmax"], state.nested_block)
            largest = nested + state.offset
        require_dtype(f"{layer}.weight.absmax", largest, *SCALE_DTYPES)
        bytes_ = found[""].flatten()
        codes = torch.stack((bytes_ >> 4, bytes_ & 15), 1).flatten()  # the first of two is the higher one
        outputs, inputs = state.shape
        if not 0 <= len(codes) - outputs * inputs <= 1:
            raise UnsupportedModel(f"{layer}.weight has {len(codes)} codes, and is {list(state.shape)}")
        numbers = _decoded(layer, codes[: outputs * inputs], found["quant_map"], largest.float(), state.block)
        return DenseWeight(numbers.view(outputs, inputs))


@dataclass(frozen=True, slots=True)
class _State:
    """What a layer's tensor `quant_state` says."""

    shape: tuple[int, int]
    """Outputs and inputs."""
    block: int
    """How many numbers have one scale."""
    nested_block: int
    offset: float
    """What is added to the decoded largest numbers."""


def _state(layer: str, stored: Tensor) -> _State:
    """Raises UnsupportedModel if the tensor is no JSON, or something is missing in it."""
    try:
        content = json.loads(bytes(stored.tolist()))
        outputs, inputs = map(int, content["shape"])
        block, nested = int(content["blocksize"]), int(content.get("nested_blocksize", 1))
        offset = float(content.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UnsupportedModel(
            f"the tensor {layer}.weight.quant_state does not have a layer's shape and blocksize: {error!r}"
        ) from error
    if min(outputs, inputs, block, nested) < 1:
        raise UnsupportedModel(f"the tensor {layer}.weight.quant_state has sizes below 1: {content}")
    return _State((outputs, inputs), block, nested, offset)


def _decoded(layer: str, codes: Tensor, meaning: Tensor, scales: Tensor, block: int) -> Tensor:
    """What codes mean, times the scale of each block of neighbours: float32 [codes].

    Raises UnsupportedModel if there are not as many scales as blocks.
    """
    num_blocks = -(-len(codes) // block)
    if scales.numel() != num_blocks:
        raise UnsupportedModel(
            f"{layer}.weight has {num_blocks} blocks of {block} numbers, and scales of {scales.numel()} blocks"
        )
    of_codes = scales.float().flatten().repeat_interleave(min(block, len(codes)))[: len(codes)]
    return meaning.float()[codes.int()].mul_(of_codes)


def _make(quantization: Mapping[str, Any]) -> _Int8Format | _NibbleFormat:
    fields = Fields(quantization)
    # The tensors themselves say which layers are quantized; thresholds and dtypes are those of activations.
    fields.names("llm_int8_skip_modules")
    in_4_bits, in_8_bits = (fields.boolean(name, default=False) for name in ("load_in_4bit", "load_in_8bit"))
    if in_4_bits == in_8_bits:
        raise fields.refuse("load_in_4bit", "true, or load_in_8bit")
    if in_8_bits:
        return _Int8Format()
    fields.word("bnb_4bit_quant_storage", ("uint8",), "uint8")
    kind = fields.word("bnb_4bit_quant_type", ("fp4", "nf4"), "fp4")
    return _NibbleFormat(kind, fields.boolean("bnb_4bit_use_double_quant", default=False))


FORMAT = _make
