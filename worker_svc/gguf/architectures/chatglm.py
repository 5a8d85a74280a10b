"""GLM-4-9B and GLM-Edge."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder, has_bias

ARCHITECTURE = GgufArchitecture(
    decoder(ConfigForm("glm", biases={"attention_bias": has_bias("attn_qkv", "attn_q", "attn_k", "attn_v")}))
)
