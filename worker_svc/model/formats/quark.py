"""AMD's Quark: FP8 with a scale for a weight, each output or block, MXFP8 and MXFP4; layers may differ.

Source: amd-quark 0.13, `quark/torch/export` and `quark/torch/quantization/config/config.py`.
"""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats._e2m1 import MX_GROUP, E2m1Format
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format
from worker_svc.model.formats._layered import DENSE, LayeredFormat
from worker_svc.model.weight_format import WeightFormat

_FP8, _FP4 = "fp8_e4m3", "fp4"
_MXFP4 = E2m1Format("weight", MX_GROUP)
_ROTATIONS = ("rotation", "quarot")
_WILD = re.compile(r"[*?\[]")


def _weight(layer: Fields) -> Fields:
    """How the weights of a layer are quantized: an object, or a list with one."""
    steps = layer.listed("weight")
    if len(steps) != 1:
        raise layer.refuse("weight", "one object: weights that are quantized twice are not read")
    return steps[0]


def _format_of(layer: Fields) -> WeightFormat:
    if not layer.has("weight"):
        return DENSE
    weight = _weight(layer)
    if weight.boolean("is_dynamic", default=False):
        raise weight.refuse("is_dynamic", "false: scales of weights are stored")
    is_fp8 = weight.word("dtype", (_FP8, _FP4)) == _FP8
    of_fp8 = ("per_block", "per_channel", "per_group", "per_tensor")
    scheme = weight.word("qscheme", of_fp8 if is_fp8 else ("per_group",))
    if scheme == "per_tensor":
        return Float8Format((None, None))
    if scheme == "per_channel":
        if weight.has("ch_axis"):
            weight.one_of((0,), "ch_axis")
        return Float8Format((1, None))
    if scheme == "per_block":
        block = weight.block("block_size")
        if block is None:
            raise weight.refuse("block_size", "two numbers, of outputs and inputs")
        return Float8Format(block)
    if weight.has("ch_axis"):
        weight.one_of((-1, 1), "ch_axis")
    weight.one_of((MX_GROUP,), "group_size")
    weight.word("scale_format", ("e8m0",))
    return Float8Format((1, MX_GROUP)) if is_fp8 else _MXFP4


def _make(quantization: Mapping[str, Any]) -> LayeredFormat:
    fields = Fields(quantization)
    fields.object("export").word("weight_format", ("real_quantized",), "real_quantized")
    # The tensors themselves say which layers are quantized.
    fields.names("exclude")
    if fields.mapping("layer_type_quant_config"):
        raise fields.refuse("layer_type_quant_config", "empty: formats of classes of layers are not read")
    if any(algorithm.text("name", "") in _ROTATIONS for algorithm in fields.listed("algo_config")):
        raise fields.refuse("algo_config", "without rotations: those of activations are not applied")
    objects, layers, patterns = fields.object("layer_quant_config"), dict[str, WeightFormat](), []
    for name in fields.mapping("layer_quant_config"):
        found = _format_of(objects.object(name))
        if _WILD.search(name):
            patterns.append((fields.pattern("layer_quant_config", fnmatch.translate(name)), found))
        else:
            layers[name] = found
    return LayeredFormat(_format_of(fields.object("global_quant_config")), layers, patterns)


FORMAT = _make
