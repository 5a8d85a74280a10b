"""GPTQ: codes of 2, 3, 4 or 8 bits that are packed along the inputs, in the layouts `gptq` and `gptq_v2`.

Source: `QuantLinear.pack` and `forward` of AutoGPTQ 0.7.1, `auto_gptq/nn_modules/qlinear/qlinear_cuda.py`. The layout
gptq_v2 and `dynamic` are those of GPTQModel.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from worker_svc.model.formats._packing import codes_in_words, unpack, words_of

_BITS = (2, 3, 4, 8)
_LAYOUTS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How a layer is quantized."""

    bits: int
    group_size: int | None


class GptqFormat:
    """A `WeightFormat` of four tensors for each layer: `qweight`, `qzeros`, `scales`, `g_idx`."""

    def __init__(self, scheme: _Scheme, dynamic: list[tuple[re.Pattern[str], _Scheme]], zero_offset: int) -> None:
        """`dynamic` are other schemes of layers whose names begin as a pattern says; `zero_offset` is added to stored
        zero points.
        """
        self._scheme, self._dynamic, self._zero_offset = scheme, dynamic, zero_offset

    def read_as(self, name: str) -> str | None:
        return name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        scheme = self._scheme_of(layer)
        groups = 1 if scheme.group_size is None else -(-inputs // scheme.group_size)
        return {
            f"{layer}.qweight": (words_of(inputs, scheme.bits), outputs),
            f"{layer}.qzeros": (groups, words_of(outputs, scheme.bits)),
            f"{layer}.scales": (groups, outputs),
            f"{layer}.g_idx": (inputs,),
        }

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        words, zeros, scales, groups = (tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx"))
        require_dtype(f"{layer}.qweight", words, torch.int32)
        require_dtype(f"{layer}.qzeros", zeros, torch.int32)
        require_dtype(f"{layer}.scales", scales, *SCALE_DTYPES)
        require_dtype(f"{layer}.g_idx", groups, torch.int32, torch.int64)
        bits = self._scheme_of(layer).bits
        outputs, inputs, size = scales.shape[1], len(groups), codes_in_words(bits)
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
        points = unpack(zeros, bits, 1).add_(self._zero_offset).bitwise_and_((1 << bits) - 1)
        return GroupedWeight(PackedCodes.whole(words, bits, 0), points, scales, groups.long())

    def group_bits(self, layer: str) -> int | None:
        scheme = self._scheme_of(layer)
        return None if scheme.bits == 8 and scheme.group_size is None else scheme.bits

    def _scheme_of(self, layer: str) -> _Scheme:
        return next((scheme for pattern, scheme in self._dynamic if pattern.match(layer)), self._scheme)


def _make(quantization: Mapping[str, Any]) -> GptqFormat:
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
    scheme = _Scheme(fields.one_of(_BITS, "bits"), fields.group_size("group_size"))
    return GptqFormat(scheme, _dynamic(fields, scheme), zero_offset=1 if named == "gptq" else 0)


def _dynamic(fields: Fields, default: _Scheme) -> list[tuple[re.Pattern[str], _Scheme]]:
    """The schemes of `dynamic`, by pattern, in order. Those of layers that it excludes (`-:`) are never used."""
    schemes = []
    for key, overrides in fields.mapping("dynamic").items():
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise UnsupportedModel(f"quantization_config.dynamic: {key!r} is no regular expression: {error}") from error
        if not isinstance(overrides, dict):
            raise UnsupportedModel(f"quantization_config.dynamic: {key!r} must have an object, not {overrides!r}")
        other = Fields(overrides, f"quantization_config.dynamic[{key!r}]")
        bits = other.one_of(_BITS, "bits") if other.has("bits") else default.bits
        group_size = other.group_size("group_size") if other.has("group_size") else default.group_size
        schemes.append((pattern, _Scheme(bits, group_size)))
    return schemes


FORMAT = _make
