"""FP8: codes in float8_e4m3fn with a scale for the whole weight, or for each block of it.

Source: `Fp8Dequantize` and `FP8Linear` of transformers 5.23, `transformers/integrations/finegrained_fp8.py`, and
section 3.3 of arXiv:2412.19437. A scale for the whole weight is that of AutoFP8.
"""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format


def _make(quantization: Mapping[str, Any]) -> Float8Format:
    fields = Fields(quantization)
    fields.word("fmt", ("e4m3",), "e4m3")
    fields.word("scale_fmt", ("float", "ue8m0"), "float")
    fields.word("expert_dtype", ("fp8",), "fp8")
    # Activations are not quantized, so neither scheme has an effect.
    fields.word("activation_scheme", ("dynamic", "static"), "dynamic")
    # The tensors themselves say which layers are quantized.
    for name in ("modules_to_not_convert", "ignored_layers"):
        fields.names(name)
    if fields.names("modules_to_convert"):
        raise fields.refuse("modules_to_convert", "null: only weights of linear layers are read in FP8")
    return Float8Format(fields.block("weight_block_size") or (None, None))


FORMAT = _make
