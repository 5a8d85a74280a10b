"""BERT and models of its form, such as MiniLM: encoders with learnt positions and norms after each sum."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.description import Activation, LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def _describe(config: Any) -> EncoderDescription | None:
    if config.hidden_act not in _ACTIVATIONS or getattr(config, "is_decoder", False):
        return None
    hidden, width, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps

    def linear(
        role: LinearRole, names: list[str], inputs: int, outputs: int, split: SplitDimension, unit: int = 1
    ) -> LinearLayer:
        stored = tuple(StoredLinear(name, (outputs,), bias=True) for name in names)
        return LinearLayer(role, inputs, stored, split, unit)

    def layer(number: int) -> EncoderLayer:
        prefix = f"encoder.layer.{number}"
        attention, head_dim = f"{prefix}.attention", hidden // config.num_attention_heads
        projections = [f"{attention}.self.{part}" for part in ("query", "key", "value")]
        by_outputs, by_inputs = SplitDimension.OUTPUTS, SplitDimension.INPUTS
        return EncoderLayer(
            qkv=linear(LinearRole.QKV, projections, hidden, hidden, by_outputs, head_dim),
            output=linear(
                LinearRole.ATTENTION_OUTPUT, [f"{attention}.output.dense"], hidden, hidden, by_inputs, head_dim
            ),
            attention_norm=LayerNorm(f"{attention}.output.LayerNorm", hidden, eps),
            up=linear(LinearRole.GATE_UP, [f"{prefix}.intermediate.dense"], hidden, width, by_outputs),
            down=linear(LinearRole.DOWN, [f"{prefix}.output.dense"], width, hidden, by_inputs),
            mlp_norm=LayerNorm(f"{prefix}.output.LayerNorm", hidden, eps),
        )

    return EncoderDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings,
        num_heads=config.num_attention_heads,
        activation=_ACTIVATIONS[config.hidden_act],
        word_embedding="embeddings.word_embeddings.weight",
        position_embedding="embeddings.position_embeddings.weight",
        type_embedding="embeddings.token_type_embeddings.weight",
        num_types=config.type_vocab_size,
        embedding_norm=LayerNorm("embeddings.LayerNorm", hidden, eps),
        layers=tuple(map(layer, range(config.num_hidden_layers))),
        # Pooled by another layer for a task that embeddings do not have; and constants.
        unused_prefixes=("pooler.", "embeddings.position_ids"),
    )


ARCHITECTURE = Architecture(__file__, "BertModel", _describe)
