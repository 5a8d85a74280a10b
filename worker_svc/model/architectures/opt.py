"""OPT: learnt positions, whose table has two rows before the first position.

Not OPT-350m, which has its norms after each sum, and embeddings of another size than the hidden one.
"""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_parts import ACTIVATIONS, describe_attention, describe_head, describe_mlp, layer_norms
from worker_svc.model.description import DecoderLayer, MlpKind, ModelDescription, PositionEmbedding, StoredLinear

_NORMS = layer_norms(1e-5)  # torch's default


def _describe(config: Any) -> ModelDescription | None:
    activation = ACTIVATIONS.get(config.activation_function)
    hidden, num_heads, bias = config.hidden_size, config.num_attention_heads, config.enable_bias
    has_norms = (
        config.do_layer_norm_before and config.layer_norm_elementwise_affine and not config._remove_final_layer_norm
    )
    if activation is None or not has_norms or config.word_embed_proj_dim != hidden:
        return None

    def layer(number: int) -> DecoderLayer:
        prefix = f"model.decoder.layers.{number}"
        qkv = tuple(StoredLinear(f"{prefix}.self_attn.{name}_proj", (hidden,), bias) for name in "qkv")
        output = StoredLinear(f"{prefix}.self_attn.out_proj", (hidden,), bias)
        up = StoredLinear(f"{prefix}.fc1", (config.ffn_dim,), bias)
        down = StoredLinear(f"{prefix}.fc2", (hidden,), bias)
        return DecoderLayer(
            _NORMS.norm(f"{prefix}.self_attn_layer_norm", hidden),
            describe_attention(num_heads, num_heads, hidden // num_heads, qkv, output),
            _NORMS.norm(f"{prefix}.final_layer_norm", hidden),
            describe_mlp(MlpKind.PLAIN, (up,), down, activation),
        )

    positions = PositionEmbedding("model.decoder.embed_positions.weight", config.max_position_embeddings + 2, first=2)
    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings,
        embedding="model.decoder.embed_tokens.weight",
        layers=tuple(map(layer, range(config.num_hidden_layers))),
        norm=_NORMS.norm("model.decoder.final_layer_norm", hidden),
        head=describe_head(hidden, config.vocab_size),
        tied_embeddings=config.tie_word_embeddings,
        positions=positions,
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "OPT", _describe)
