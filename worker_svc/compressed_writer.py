"""The tensors in which compressed-tensors stores linear layers, made of dense weights.

Source: compressed-tensors 0.20.0, `compressed_tensors/compressors/pack_quantized` and `.../naive_quantized`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORD = 32
# Outputs that are quantized at once: float32 is large.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    """How weights are stored, and what the checkpoint says of activations."""

    bits: int
    is_packed: bool
    """Whether codes are packed in words; else each is a byte."""
    group: int | None
    """Inputs with one scale; None: each output has one. Codes are around zero: transformers 5.23 does not load packed
    zero points.
    """
    activation_bits: int | None

    def takes(self, inputs: int) -> bool:
        """Whether a layer with so many inputs can be stored."""
        return self.group is None or inputs % self.group == 0


def scheme_named(name: str, group: int) -> CompressedScheme:
    """The scheme of a format w8a8, w8a16 or w4a16; in 4 bits with groups of this size."""
    match name:
        case "w8a8":
            return CompressedScheme(8, is_packed=False, group=None, activation_bits=8)
        case "w8a16":
            return CompressedScheme(8, is_packed=True, group=None, activation_bits=None)
        case "w4a16":
            return CompressedScheme(4, is_packed=True, group=group, activation_bits=None)
    raise ValueError(f"name: must be w8a8, w8a16 or w4a16, not {name!r}")


def quantization_config(scheme: CompressedScheme, ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json; `ignored` are names of linear layers that are left as they were."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
    }
    activations = None
    if scheme.activation_bits is not None:
        activations = {
            "num_bits": scheme.activation_bits,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    layout = "pack-quantized" if scheme.is_packed else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": {**group, "format": layout}},
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
    }


def compress(layer: str, weight: Tensor, scheme: CompressedScheme) -> Mapping[str, Tensor]:
    """The tensors of a linear layer by their names, of its weight [outputs, inputs]; scales have its dtype.

    A scale is that of the package's observer `minmax`: codes are from the largest number's negative to one step less.
    """
    outputs, inputs = weight.shape
    group, middle = scheme.group or inputs, 1 << scheme.bits - 1
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=weight.dtype)
    for start in range(0, outputs, _ROWS):
        rows = slice(start, start + _ROWS)
        numbers = weight[rows].float().view(-1, inputs // group, group)
        scales[rows] = (numbers.abs().amax(2) / (middle - 0.5)).to(weight.dtype)
        steps = scales[rows].float().clamp_(min=torch.finfo(torch.float32).tiny)
        codes[rows] = (
            (numbers / steps[..., None]).round_().clamp_(-middle, middle - 1).add_(middle).flatten(1).to(torch.uint8)
        )
    tensors = {f"{layer}.weight_scale": scales}
    if not scheme.is_packed:
        return tensors | {f"{layer}.weight": (codes.int() - middle).to(torch.int8)}
    tensors[f"{layer}.weight_packed"] = pack_words(codes, scheme.bits)
    tensors[f"{layer}.weight_shape"] = torch.tensor([outputs, inputs])
    return tensors


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n] as int32 words [rows, words], each from its lowest bits up; zeros fill the last one."""
    per_word = _WORD // bits
    shifts = torch.arange(0, _WORD, bits)
    words = torch.empty(len(codes), -(-codes.shape[1] // per_word), dtype=torch.int32)
    for start in range(0, len(codes), _ROWS):
        rows = slice(start, start + _ROWS)
        padded = torch.nn.functional.pad(codes[rows], (0, -codes.shape[1] % per_word)).long()
        values = (padded.view(len(padded), -1, per_word) << shifts).sum(-1)
        words[rows] = (values - (values >> 31 << 32)).int()
    return words
