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
_MXFP8, _IN_BLOCKS = Float8Format((1, MX_GROUP)), Float8Format((_BLOCK, _BLOCK))
_ALGORITHMS: Mapping[str, tuple[WeightFormat, int | None]] = {
    "fp8": (Float8Format((None, None)), None),
    "fp8_block_scales": (_IN_BLOCKS, _BLOCK),
    "fp8_pb_wo": (_IN_BLOCKS, _BLOCK),
    "fp8_per_channel_per_token": (Float8Format((1, None)), None),
    "mxfp4": (_MXFP4, MX_GROUP),
    "mxfp8": (_MXFP8, MX_GROUP),
    "nvfp4": (_NVFP4, NV_GROUP),
    "w4a16_nvfp4": (_NVFP4, NV_GROUP),
    "w4a8_mxfp4_fp8": (_MXFP4, MX_GROUP),
    "w4a8_nvfp4_fp8": (_NVFP4, NV_GROUP),
}
"""By `quant_algo`: the format, and how many inputs are a group, where there are some. Activations are not quantized, so
what the names say of them has no effect.
"""


def _format_of(fields: Fields, algorithm: str) -> WeightFormat:
    found, group = _ALGORITHMS[algorithm]
    if group is not None and fields.has("group_size"):
        fields.one_of((group,), "group_size")
    return found


def _make(quantization: Mapping[str, Any]) -> WeightFormat:
    fields = Fields(quantization)
    if fields.has("quantization"):  # as hf_quant_config.json has it
        fields = fields.object("quantization")
    # The tensors themselves say which layers are quantized.
    for name in ("ignore", "exclude_modules"):
        fields.names(name)
    if not fields.has("quant_algo") and fields.has("kv_cache_quant_algo", "kv_cache_scheme"):
        return DENSE  # only keys and values are quantized
    algorithm = fields.word("quant_algo", (*_ALGORITHMS, _MIXED))
    if algorithm != _MIXED:
        return _format_of(fields, algorithm)
    objects = fields.object("quantized_layers")
    layers = {name: objects.object(name) for name in fields.mapping("quantized_layers")}
    return LayeredFormat(
        DENSE, {name: _format_of(layer, layer.word("quant_algo", _ALGORITHMS)) for name, layer in layers.items()}
    )


FORMAT = _make
