"""AMD's Quark: FP8 with a scale for a weight or each output, and MXFP4; layers may differ.

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
_BLOCKS = {"per_tensor": (None, None), "per_channel": (1, None)}
_MXFP4 = E2m1Format("weight", MX_GROUP)
_ROTATIONS = ("rotation", "quarot")


def _weight(layer: Fields) -> Fields:
    """How the weights of a layer are quantized: an object, or a list with one."""
    if not layer.is_list("weight"):
        return layer.object("weight")
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
    if weight.word("dtype", (_FP8, _FP4), "") == _FP8:
        return Float8Format(_BLOCKS[weight.word("qscheme", tuple(_BLOCKS), "")])
    weight.word("qscheme", ("per_group",), "")
    weight.one_of((MX_GROUP,), "group_size")
    weight.word("scale_format", ("e8m0",), "")
    return _MXFP4


def _make(quantization: Mapping[str, Any]) -> LayeredFormat:
    fields = Fields(quantization)
    fields.object("export").word("weight_format", ("real_quantized",), "real_quantized")
    # The tensors themselves say which layers are quantized.
    fields.names("exclude")
    if fields.mapping("layer_type_quant_config"):
        raise fields.refuse("layer_type_quant_config", "empty: formats of classes of layers are not read")
    if any(algorithm.text("name", "") in _ROTATIONS for algorithm in fields.listed("algo_config")):
        raise fields.refuse("algo_config", "without rotations: those of activations are not applied")
    layers = fields.object("layer_quant_config")
    patterns = [
        (re.compile(fnmatch.translate(pattern)), _format_of(layers.object(pattern)))
        for pattern in fields.mapping("layer_quant_config")
    ]
    return LayeredFormat(_format_of(fields.object("global_quant_config")), {}, patterns)


FORMAT = _make
