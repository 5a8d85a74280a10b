"""GTE, such as snowflake-arctic-embed-m-v2.0: BERT with rotary positions and gated MLPs."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_rotary_encoder
from worker_svc.model.encoder_description import EncoderDescription

_NAMES = EncoderNames(
    "gte",
    qkv=("attention.qkv_proj",),
    output="attention.o_proj",
    attention_norm="attn_ln",
    gate_up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    is_gated=True,
)


def _describe(config: Any) -> EncoderDescription | None:
    return describe_rotary_encoder(config, _NAMES, HeadNames("gte.pooler.dense", "classifier"))


ARCHITECTURE = Architecture.of_encoder(__file__, "Gte", _describe)
