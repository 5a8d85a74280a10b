"""Hunyuan without experts: the base of rotary positions is written as it is computed."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("hunyuan_v1_dense")))
