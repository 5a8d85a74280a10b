"""StarCoder 2."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder, has_bias

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("starcoder2", biases={"use_bias": has_bias("attn_q", "ffn_up")})))
