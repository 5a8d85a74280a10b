"""Phi 3, 3.5 and 4."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.rope import RopeForm

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("phi3", rope=RopeForm(has_two_contexts=True))))
