"""Gemma 3: files have the text model alone."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.rope import RopeForm

ARCHITECTURE = GgufArchitecture(
    decoder(ConfigForm("gemma3_text", layers_of_27b=62, rope=RopeForm(window_theta=10_000.0)))
)
