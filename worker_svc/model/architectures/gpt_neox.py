"""GPT-NeoX and Pythia: attention and MLP side by side, and rotary positions of a part of each head."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_parts import ACTIVATIONS, describe_attention, describe_head, describe_mlp, layer_norms
from worker_svc.model.describe_rope import context_length, ropes_of
from worker_svc.model.description import DecoderLayer, MlpKind, ModelDescription, RopeConfig, StoredLinear


def _describe(config: Any) -> ModelDescription | None:
    hidden, num_heads, norms = config.hidden_size, config.num_attention_heads, layer_norms(config.layer_norm_eps)
    head_dim = hidden // num_heads
    activation, ropes = ACTIVATIONS.get(config.hidden_act), ropes_of(config, head_dim, partial=True)
    # transformers rotates by this field, and has heads of another size.
    is_other = (getattr(config, "head_dim", None) or head_dim) != head_dim
    if activation is None or ropes is None or is_other:
        return None
    bias = config.attention_bias

    def layer(number: int, rope: RopeConfig) -> DecoderLayer:
        prefix = f"gpt_neox.layers.{number}"
        # Queries, keys and values of one head lie side by side.
        qkv = StoredLinear(f"{prefix}.attention.query_key_value", (hidden,) * 3, bias, interleaved=head_dim)
        output = StoredLinear(f"{prefix}.attention.dense", (hidden,), bias)
        up = StoredLinear(f"{prefix}.mlp.dense_h_to_4h", (config.intermediate_size,), bias=True)
        down = StoredLinear(f"{prefix}.mlp.dense_4h_to_h", (hidden,), bias=True)
        return DecoderLayer(
            norms.norm(f"{prefix}.input_layernorm", hidden),
            describe_attention(num_heads, num_heads, head_dim, (qkv,), output, rope=rope),
            norms.norm(f"{prefix}.post_attention_layernorm", hidden),
            describe_mlp(MlpKind.PLAIN, (up,), down, activation),
            parallel=config.use_parallel_residual,
        )

    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=context_length(config, ropes),
        embedding="gpt_neox.embed_in.weight",
        layers=tuple(map(layer, range(config.num_hidden_layers), ropes)),
        norm=norms.norm("gpt_neox.final_layer_norm", hidden),
        head=describe_head(hidden, config.vocab_size),
        tied_embeddings=config.tie_word_embeddings,
        renamed=(("embed_out.", "lm_head."),),
        # Causal masks
        unused_suffixes=(".attention.bias", ".attention.masked_bias"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "GPTNeoX", _describe)
