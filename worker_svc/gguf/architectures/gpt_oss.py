"""gpt-oss: gate and up are two tensors of all experts, and one in transformers."""

import torch

from worker_svc.gguf.architecture import GgufArchitecture, JoinedTensors
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.rope import RopeForm

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "gpt_oss",
            names={"expert_feed_forward_length": "intermediate_size"},
            rope=RopeForm(truncates=False),
        )
    ),
    names={"self_attn.sinks": "attn_sinks.weight"},
    joined={
        f"mlp.experts.gate_up_proj.{kind}": JoinedTensors((f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"), torch.cat)
        for kind in ("weight", "bias")
    },
)
