"""Gemma 2: layers with a window have one of 4,096 keys if the file does not say it."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("gemma2", window=4096, layers_of_27b=46)))
