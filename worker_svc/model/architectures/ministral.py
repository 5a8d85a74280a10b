"""Ministral 8B: Mistral, some of whose layers have a window."""

from functools import partial

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder

_describe = partial(describe_decoder, windows=Windows.BY_LAYER_TYPES)

ARCHITECTURE = Architecture.of_decoder(__file__, "Ministral", _describe)
