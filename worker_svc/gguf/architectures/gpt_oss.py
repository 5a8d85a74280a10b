"""gpt-oss: gate and up are two tensors of all experts, and one in transformers, in which their outputs take turns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.gguf.architecture import GgufArchitecture, JoinedTensors
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.rope import RopeForm


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(parts), 1).flatten(0, 1)


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "gpt_oss",
            names={"expert_feed_forward_length": "intermediate_size"},
            fixed={"attention_bias": True},
            rope=RopeForm(truncates=False),
        )
    ),
    names={"self_attn.sinks": "attn_sinks.weight"},
    joined={
        f"mlp.experts.gate_up_proj.{kind}": JoinedTensors((f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"), _in_turn)
        for kind in ("weight", "bias")
    },
)
