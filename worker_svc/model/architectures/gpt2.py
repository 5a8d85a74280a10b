"""GPT-2, and models with the same model_type: DistilGPT2, DialoGPT."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_parts import ACTIVATIONS, describe_attention, describe_head, describe_mlp, layer_norms
from worker_svc.model.description import DecoderLayer, MlpKind, ModelDescription, PositionEmbedding, StoredLinear


def _describe(config: Any) -> ModelDescription | None:
    activation = ACTIVATIONS.get(config.activation_function)
    if activation is None or config.add_cross_attention:
        return None
    hidden, num_heads, norms = config.hidden_size, config.num_attention_heads, layer_norms(config.layer_norm_epsilon)
    head_dim = hidden // num_heads
    width = 4 * hidden if config.n_inner is None else config.n_inner

    def linear(name: str, *outputs: int) -> StoredLinear:
        return StoredLinear(name, outputs, bias=True, transposed=True)

    def scale(number: int) -> float:
        """`reorder_and_upcast_attn` has no effect: scores are computed in float32."""
        root = float(head_dim**-0.5) if config.scale_attn_weights else 1.0
        return root / (number + 1) if config.scale_attn_by_inverse_layer_idx else root

    def layer(number: int) -> DecoderLayer:
        prefix = f"transformer.h.{number}"
        qkv = linear(f"{prefix}.attn.c_attn", hidden, hidden, hidden)
        output = linear(f"{prefix}.attn.c_proj", hidden)
        up, down = linear(f"{prefix}.mlp.c_fc", width), linear(f"{prefix}.mlp.c_proj", hidden)
        return DecoderLayer(
            norms.norm(f"{prefix}.ln_1", hidden),
            describe_attention(num_heads, num_heads, head_dim, (qkv,), output, scale=scale(number)),
            norms.norm(f"{prefix}.ln_2", hidden),
            describe_mlp(MlpKind.PLAIN, (up,), down, activation),
        )

    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings,
        embedding="transformer.wte.weight",
        layers=tuple(map(layer, range(config.num_hidden_layers))),
        norm=norms.norm("transformer.ln_f", hidden),
        head=describe_head(hidden, config.vocab_size),
        tied_embeddings=config.tie_word_embeddings,
        positions=PositionEmbedding("transformer.wpe.weight", config.max_position_embeddings),
        # Causal masks
        unused_suffixes=(".attn.bias", ".attn.masked_bias"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "GPT2", _describe, generating_class="GPT2LMHeadModel")
