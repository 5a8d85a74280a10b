"""SmolLM3: every fourth layer has no positions."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("smollm3")), has_rotated_neighbours=True)
