"""GLM-4-0414 and GLM-Z1."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("glm4")))
