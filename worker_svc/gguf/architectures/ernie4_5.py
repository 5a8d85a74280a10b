"""ERNIE 4.5 without experts."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder, has_bias

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("ernie4_5", biases={"use_bias": has_bias("attn_q", "ffn_up")})))
