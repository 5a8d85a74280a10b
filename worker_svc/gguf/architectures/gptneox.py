"""GPT-NeoX and Pythia."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(
    decoder(ConfigForm("gpt_neox", names={"use_parallel_residual": "use_parallel_residual"}))
)
