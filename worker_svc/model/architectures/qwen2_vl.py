"""Qwen2-VL: the text model is that of Qwen 2. Of text alone, the three positions of a token are equal."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder

_describe = partial(describe_decoder, windows=Windows.BY_LAYER_TYPES, qkv_bias=True)

ARCHITECTURE = Architecture.of_text_model(__file__, "Qwen2VL", _describe)
