"""Qwen 2 and 2.5: queries, keys and values have biases, and some layers may have a window."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder

_describe = partial(describe_decoder, windows=Windows.BY_LAYER_TYPES, qkv_bias=True)

ARCHITECTURE = Architecture.of_decoder(__file__, "Qwen2", _describe)
