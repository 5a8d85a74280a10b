"""OLMo 2 and 3, which has windows and scales positions where there are none."""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, read_decoder
from worker_svc.gguf.metadata import GgufMetadata


def _read_config(metadata: GgufMetadata) -> Any:
    return read_decoder(metadata, ConfigForm("olmo3" if metadata.peek("attention.sliding_window") else "olmo2"))


ARCHITECTURE = GgufArchitecture(_read_config)
