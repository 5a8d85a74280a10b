"""Seed-OSS."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder, has_bias

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "seed_oss",
            biases={
                "attention_bias": has_bias("attn_q", "attn_k", "attn_v"),
                "attention_out_bias": has_bias("attn_output"),
            },
        )
    )
)
