"""ModernBERT: an encoder with the layers of a decoder. Two of three see a window of tokens on both sides. Embeddings
have a norm, so the first layer has none before attention.
"""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_parts import ACTIVATIONS, NormForm, describe_attention, describe_mlp
from worker_svc.model.describe_rope import context_length, ropes_of
from worker_svc.model.describe_score_head import describe_score_head, has_score_head
from worker_svc.model.description import (
    DecoderLayer,
    LinearLayer,
    LinearRole,
    MlpKind,
    ModelDescription,
    Norm,
    NormKind,
    RopeConfig,
    SplitDimension,
    StoredLinear,
)
from worker_svc.model.score_head_description import DenseActivation, ScoreHeadSpec


def _describe(config: Any) -> ModelDescription | None:
    hidden, num_heads, width = config.hidden_size, config.num_attention_heads, config.intermediate_size
    activation, ropes = ACTIVATIONS.get(config.hidden_activation), ropes_of(config, hidden // num_heads)
    if activation is None or ropes is None:
        return None
    if has_score_head(config) and config.classifier_activation not in list(DenseActivation):
        return None

    def norm(name: str) -> Norm:
        return NormForm(config.norm_eps, NormKind.LAYER, has_bias=config.norm_bias).norm(name, hidden)

    def layer(number: int, kind: str, rope: RopeConfig) -> DecoderLayer:
        prefix = f"model.layers.{number}"
        # transformers counts the keys on one side of the query's own.
        window = config.sliding_window + 1 if kind == "sliding_attention" else None
        qkv = StoredLinear(f"{prefix}.attn.Wqkv", (hidden,) * 3, config.attention_bias)
        output = StoredLinear(f"{prefix}.attn.Wo", (hidden,), config.attention_bias)
        gate_up = StoredLinear(f"{prefix}.mlp.Wi", (width,) * 2, config.mlp_bias)
        down = StoredLinear(f"{prefix}.mlp.Wo", (hidden,), config.mlp_bias)
        return DecoderLayer(
            norm(f"{prefix}.attn_norm") if number else None,
            describe_attention(
                num_heads,
                num_heads,
                hidden // num_heads,
                (qkv,),
                output,
                rope=rope,
                window=window,
                bidirectional=True,
            ),
            norm(f"{prefix}.mlp_norm"),
            describe_mlp(MlpKind.GATED, (gate_up,), down, activation),
        )

    decoder = StoredLinear("decoder", (config.vocab_size,))
    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=context_length(config, ropes),
        embedding="model.embeddings.tok_embeddings.weight",
        embedding_norm=norm("model.embeddings.norm"),
        layers=tuple(map(layer, range(config.num_hidden_layers), config.layer_types, ropes)),
        norm=norm("model.final_norm"),
        head=LinearLayer(LinearRole.HEAD, hidden, (decoder,), SplitDimension.OUTPUTS),
        tied_embeddings=True,
        # Of heads: that of pre-training, and that for sequences, which `score_head.py` reads.
        unused_prefixes=("head.", "decoder.", "classifier."),
        is_encoder=True,
        score_head=_score_head(config, norm("head.norm")) if has_score_head(config) else None,
    )


def _score_head(config: Any, norm: Norm) -> ScoreHeadSpec:
    return replace(
        describe_score_head(config, "classifier", "head.dense", DenseActivation(config.classifier_activation)),
        dense_bias=config.classifier_bias,
        norm=norm,
        of_mean=config.classifier_pooling == "mean",
    )


ARCHITECTURE = Architecture.of_encoder(__file__, "ModernBert", _describe)
