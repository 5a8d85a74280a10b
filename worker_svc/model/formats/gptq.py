"""GPTQ: codes of 2, 3, 4 or 8 bits that are packed along the inputs, in the layouts `gptq` and `gptq_v2`.

Source: `QuantLinear.pack` and `forward` of AutoGPTQ 0.7.1, `auto_gptq/nn_modules/qlinear/qlinear_cuda.py`. The layout
gptq_v2 and `dynamic` are those of GPTQModel.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import (
    SCALE_DTYPES,
    GroupedWeight,
    PackedCodes,
    require_dtype,
)
from worker_svc.model.formats._layered import LayeredFormat
from worker_svc.model.formats._packing import codes_in_words, unpack, words_of

_BITS = (2, 3, 4, 8)
_LAYOUTS = ("gptq", "gptq_v2")
_GROUPS_ENDING = ".g_idx"


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """A `WeightFormat` of four tensors for each layer: `qweight`, `qzeros`, `scales`, `g_idx`."""

    bits: int
    group_size: int | None
    """Of inputs; None: all inputs are one group."""
    zero_offset: int
    """What is added to stored zero points."""
    is_ordered: bool = False
    """Whether groups are of neighbouring inputs: `g_idx` is not read."""

    def read_as(self, name: str) -> str | None:
        return None if self.is_ordered and name.endswith(_GROUPS_ENDING) else name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        groups = -(-inputs // (self.group_size or inputs))
        shapes: dict[str, tuple[int, ...]] = {
            f"{layer}.qweight": (words_of(inputs, self.bits), outputs),
            f"{layer}.qzeros": (groups, words_of(outputs, self.bits)),
            f"{layer}.scales": (groups, outputs),
        }
        return shapes if self.is_ordered else shapes | {f"{layer}{_GROUPS_ENDING}": (inputs,)}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        words, zeros, scales = (tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales"))
        require_dtype(f"{layer}.qweight", words, torch.int32)
        require_dtype(f"{layer}.qzeros", zeros, torch.int32)
        require_dtype(f"{layer}.scales", scales, *SCALE_DTYPES)
        bits, size = self.bits, codes_in_words(self.bits)
        groups = self._groups(layer, tensors, len(words) * 32 // bits)
        outputs, inputs = scales.shape[1], len(groups)
        if outputs % size or inputs % size:
            raise UnsupportedModel(
                f"{layer}: GPTQ stores weights in {bits} bits of a multiple of {size} outputs and inputs, not of "
                f"{outputs} and {inputs}"
            )
        first, last = int(groups.min()), int(groups.max())
        if first < 0 or last >= len(scales):
            raise UnsupportedModel(
                f"the tensor {layer}.g_idx must have groups from 0 to {len(scales) - 1}, not from {first} to {last}"
            )
        # A code has no room for the zero point -1: 0 is stored as the largest code.
        points = unpack(zeros, bits, 1).add_(self.zero_offset).bitwise_and_((1 << bits) - 1)
        return GroupedWeight(PackedCodes.whole(words, bits, 0), points, scales, groups.long())

    def _groups(self, layer: str, tensors: Mapping[str, Tensor], inputs: int) -> Tensor:
        """The group of each input."""
        if self.is_ordered:
            return torch.arange(inputs) // (self.group_size or inputs)
        groups = tensors[f"{layer}{_GROUPS_ENDING}"]
        require_dtype(f"{layer}{_GROUPS_ENDING}", groups, torch.int32, torch.int64)
        return groups

    def group_bits(self, layer: str) -> int | None:
        return None if self.bits == 8 and self.group_size is None else self.bits


def _make(quantization: Mapping[str, Any]) -> LayeredFormat:
    fields = Fields(quantization)
    layout = fields.word("format", _LAYOUTS, "gptq")
    named = fields.word("checkpoint_format", _LAYOUTS, layout)
    if fields.has("format") and named != layout:
        raise fields.refuse("checkpoint_format", f"{layout}, as format is")
    if fields.boolean("is_marlin_format", default=False):
        raise fields.refuse("is_marlin_format", "false: the layout of the Marlin kernels is not read")
    fields.word("pack_dtype", ("int32",), "int32")
    for name in ("adapter", "rotation"):
        if fields.has(name):
            raise fields.refuse(name, "null: it would change the weights, and is not applied")
    # The tensors themselves say which layers are quantized, and what their zero points and groups are.
    for name in ("sym", "desc_act", "static_groups", "lm_head"):
        fields.boolean(name, default=False)
    fields.names("modules_in_block_to_quantize")
    bits, group_size = fields.one_of(_BITS, "bits"), fields.group_size("group_size")
    default = GptqFormat(bits, group_size, zero_offset=1 if named == "gptq" else 0)
    return LayeredFormat(default, {}, _dynamic(fields, default))


def _dynamic(fields: Fields, default: GptqFormat) -> list[tuple[re.Pattern[str], GptqFormat]]:
    """The formats of `dynamic`, by pattern, in order. Those of layers that it excludes (`-:`) are never used."""
    formats = []
    for key, overrides in fields.mapping("dynamic").items():
        pattern = fields.pattern("dynamic", key.removeprefix("-:").removeprefix("+:"))
        if not isinstance(overrides, dict):
            raise UnsupportedModel(f"quantization_config.dynamic: {key!r} must have an object, not {overrides!r}")
        other = Fields(overrides, f"quantization_config.dynamic[{key!r}]")
        bits = other.one_of(_BITS, "bits") if other.has("bits") else default.bits
        group_size = other.group_size("group_size") if other.has("group_size") else default.group_size
        formats.append((pattern, replace(default, bits=bits, group_size=group_size)))
    return formats


FORMAT = _make
