"""Nomic BERT, such as nomic-embed-text-v1.5: BERT with rotary positions, gated MLPs and no biases."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_rotary_encoder
from worker_svc.model.encoder_description import EncoderDescription

_NAMES = EncoderNames(
    "nomic_bert",
    layers="encoder.layers",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    gate_up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
    embedding_norm="emb_ln",
    is_gated=True,
    has_biases=False,
)


def _describe(config: Any) -> EncoderDescription | None:
    return describe_rotary_encoder(config, _NAMES, HeadNames("nomic_bert.pooler.dense", "classifier"))


ARCHITECTURE = Architecture.of_encoder(__file__, "NomicBert", _describe)
