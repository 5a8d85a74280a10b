"""Phi-1, 1.5 and 2: attention and MLP side by side behind one norm, and rotary positions of a part of each head."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_parts import ACTIVATIONS, describe_attention, describe_head, describe_mlp, layer_norms
from worker_svc.model.describe_rope import context_length, ropes_of
from worker_svc.model.description import DecoderLayer, MlpKind, ModelDescription, RopeConfig, StoredLinear


def _describe(config: Any) -> ModelDescription | None:
    hidden, num_heads, num_kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim: int = getattr(config, "head_dim", None) or hidden // num_heads
    activation, ropes = ACTIVATIONS.get(config.hidden_act), ropes_of(config, head_dim, partial=True)
    # The head has a bias, which a tied one cannot have here.
    if activation is None or ropes is None or config.qk_layernorm or config.tie_word_embeddings:
        return None

    norms = layer_norms(config.layer_norm_eps)

    def layer(number: int, rope: RopeConfig) -> DecoderLayer:
        prefix = f"model.layers.{number}"
        widths = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        qkv = tuple(StoredLinear(f"{prefix}.self_attn.{name}_proj", (widths[name],), bias=True) for name in widths)
        output = StoredLinear(f"{prefix}.self_attn.dense", (hidden,), bias=True)
        up = StoredLinear(f"{prefix}.mlp.fc1", (config.intermediate_size,), bias=True)
        down = StoredLinear(f"{prefix}.mlp.fc2", (hidden,), bias=True)
        norm = norms.norm(f"{prefix}.input_layernorm", hidden)
        return DecoderLayer(
            norm,
            describe_attention(num_heads, num_kv_heads, head_dim, qkv, output, rope=rope),
            norm,
            describe_mlp(MlpKind.PLAIN, (up,), down, activation),
            parallel=True,
        )

    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=context_length(config, ropes),
        embedding="model.embed_tokens.weight",
        layers=tuple(map(layer, range(config.num_hidden_layers), ropes)),
        norm=norms.norm("model.final_layernorm", hidden),
        head=describe_head(hidden, config.vocab_size, bias=True),
        tied_embeddings=False,
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Phi", _describe)
