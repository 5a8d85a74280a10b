"""AutoRound: weights that its tool has tuned, in the layouts of other formats; layers may differ.

Source: auto-round 0.16.1, `auto_round/export/export_to_autoround`, `auto_round/inference/convert_model.py` and
`auto_round_extension/torch/qlinear_torch.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

from worker_svc.errors import UnsupportedModel
from worker_svc.model.formats._e2m1 import MX_GROUP, NV_GROUP
from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format
from worker_svc.model.formats._layered import LayeredFormat
from worker_svc.model.formats.awq import AwqFormat
from worker_svc.model.formats.compressed_tensors import MXFP4, NVFP4
from worker_svc.model.formats.gptq import GptqFormat
from worker_svc.model.weight_format import WeightFormat

_BITS = range(2, 9)
_LARGEST_CODE = 8  # bits; a number of more is not quantized
_OF_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_OF_FLOATS = ("auto_round:fp8", "auto_round:fp8_static", "auto_round:llm_compressor")
# Zero points are stored less 1, as GPTQ has them, or as they are. Groups are of neighbouring inputs in both.
_ZERO_OFFSETS = {
    "auto": 1,
    "auto_round": 0,
    "auto_round:auto_gptq": 1,
    "auto_round:exllamav2": 0,
    "auto_round:gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round:tritonv2": 0,
}
_PACKINGS = (*_ZERO_OFFSETS, *_OF_AWQ, *_OF_FLOATS)
# A key that is no name of a layer is a pattern.
_NAME_OF_A_LAYER = re.compile(r"(?:\w+\.)+\d+\.[\w.]+")
_CHANGING = ("rotation_config", "spinquant_config", "super_bits", "transform_config")


def _format_of(fields: Fields) -> WeightFormat:
    """How weights are stored, of a model or a layer."""
    for name in _CHANGING:
        if fields.has(name):
            raise fields.refuse(name, "null: it would change the weights, and is not applied")
    data_type = fields.text("data_type", "int")
    packing = fields.word("packing_format", _PACKINGS, "auto" if data_type == "int" else "auto_round:llm_compressor")
    if packing in _OF_FLOATS:
        return _float_format(fields, data_type)
    if data_type != "int":
        raise fields.refuse("data_type", f"int with the packing_format {packing}")
    if fields.has("act_bits"):
        fields.one_of((16, 32), "act_bits")
    fields.boolean("sym", default=True)  # zero points are stored in any case
    if packing in _OF_AWQ:
        fields.one_of((4,), "bits")
        return AwqFormat(fields.group_size("group_size"))
    return GptqFormat(
        fields.one_of(_BITS, "bits"), fields.group_size("group_size"), _ZERO_OFFSETS[packing], is_ordered=True
    )


def _float_format(fields: Fields, data_type: str) -> WeightFormat:
    """That of numbers of 4 or 8 bits, by what AutoRound calls them."""
    bits = fields.one_of((4, 8), "bits")
    if data_type.startswith("nv_fp") and bits == 4:
        fields.one_of((NV_GROUP,), "group_size")
        return NVFP4
    if data_type.startswith("mx_fp"):
        fields.one_of((MX_GROUP,), "group_size")
        return MXFP4 if bits == 4 else Float8Format((1, MX_GROUP))
    fields.word("fmt", ("e4m3",), "e4m3")
    if not data_type.startswith("fp") or bits != 8:
        raise fields.refuse("data_type", "fp, mx_fp or nv_fp, of 8, 4 or 8, and 4 bits")
    if fields.is_list("group_size"):
        return Float8Format(fields.block("group_size") or (None, None))
    # -1 is one scale for each output, and 0 one for the weight.
    return Float8Format((1, None) if fields.one_of((-1, 0), "group_size") else (None, None))


def _make(quantization: Mapping[str, Any]) -> LayeredFormat:
    fields = Fields(quantization)
    default = _format_of(fields)
    layers: dict[str, WeightFormat] = {}
    patterns: list[tuple[re.Pattern[str], WeightFormat]] = []
    for name, changes in fields.mapping("extra_config").items():
        if not isinstance(changes, dict):
            raise UnsupportedModel(f"quantization_config.extra_config: {name!r} must have an object, not {changes!r}")
        bits = changes.get("bits")
        if isinstance(bits, int) and bits > _LARGEST_CODE:
            continue  # its tensors say so
        layers[name] = _format_of(Fields({**quantization, **changes}, f"quantization_config.extra_config[{name!r}]"))
        if _NAME_OF_A_LAYER.fullmatch(name) is None:
            patterns.append((fields.pattern("extra_config", name), layers[name]))
    return LayeredFormat(default, layers, patterns, anywhere=True)


FORMAT = _make
