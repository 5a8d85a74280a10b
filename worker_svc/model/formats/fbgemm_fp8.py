"""FP8 as FBGEMM computes it: codes in float8_e4m3fn with a scale for each output.

Source: `FbgemmFp8Linear` of transformers 5.23, `transformers/integrations/fbgemm_fp8.py`.
"""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._float8 import Float8Format


def _make(quantization: Mapping[str, Any]) -> Float8Format:
    # The tensors themselves say which layers are quantized, and activations are not: `activation_scale_ub` has no
    # effect.
    Fields(quantization).names("modules_to_not_convert")
    return Float8Format((1, None))


FORMAT = _make
