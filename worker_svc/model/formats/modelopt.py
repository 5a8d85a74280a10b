"""NVIDIA's ModelOpt: FP8, MXFP8, NVFP4 and MXFP4; layers may differ.

Source: nvidia-modelopt 0.47.0, `modelopt/torch/export/quant_utils.py` (`to_quantized_weight`) and
`modelopt/torch/export/convert_hf_config.py`.
"""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats._e2m1 import MX_GROUP, NV_GROUP, E2m1Format
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format
from worker_svc.model.formats._layered import DENSE, LayeredFormat
from worker_svc.model.weight_format import WeightFormat

_MIXED = "mixed_precision"
_BLOCK = 128  # outputs, and inputs, of a block of the algorithm that has some


_MXFP4, _NVFP4 = E2m1Format("weight", MX_GROUP), E2m1Format("weight", NV_GROUP, "weight_scale_2")
_ALGORITHMS: Mapping[str, WeightFormat] = {
    "fp8": Float8Format((None, None)),
    "fp8_pb_wo": Float8Format((_BLOCK, _BLOCK)),
    "fp8_per_channel_per_token": Float8Format((1, None)),
    "mxfp4": _MXFP4,
    "mxfp8": Float8Format((1, MX_GROUP)),
    "nvfp4": _NVFP4,
    "w4a16_nvfp4": _NVFP4,
    "w4a8_mxfp4_fp8": _MXFP4,
    "w4a8_nvfp4_fp8": _NVFP4,
}
"""By `quant_algo`. Activations are not quantized, so what their names say of them has no effect."""


def _algorithm(fields: Fields) -> WeightFormat:
    found = _ALGORITHMS[fields.word("quant_algo", tuple(_ALGORITHMS), "")]
    if isinstance(found, E2m1Format) and fields.has("group_size"):
        fields.one_of((found.group,), "group_size")
    return found


def _make(quantization: Mapping[str, Any]) -> WeightFormat:
    fields = Fields(quantization)
    if fields.has("quantization"):  # as hf_quant_config.json has it
        fields = fields.object("quantization")
    if not fields.has("quant_algo"):
        raise fields.refuse("quant_algo", "the name of an algorithm")
    # The tensors themselves say which layers are quantized.
    for name in ("ignore", "exclude_modules"):
        fields.names(name)
    if fields.word("quant_algo", (*_ALGORITHMS, _MIXED), "") != _MIXED:
        return _algorithm(fields)
    layers, names = fields.object("quantized_layers"), fields.mapping("quantized_layers")
    return LayeredFormat(DENSE, {name: _algorithm(layers.object(name)) for name in names})


FORMAT = _make
