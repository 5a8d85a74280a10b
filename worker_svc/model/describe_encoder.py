"""Describes encoders whose config and tensors are named as those of BERT or RoBERTa."""

from typing import Any

from worker_svc.model.describe_score_head import describe_score_head, has_score_head
from worker_svc.model.description import Activation, LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def describe_encoder(
    config: Any, base: str, score_head: tuple[str, str], *, first_position: int = 0
) -> EncoderDescription | None:
    """The description; None if an activation or another feature cannot be described.

    A model with a head has the tensors of the encoder under the name `base`. One that scores or classifies has the
    linear layers `score_head` before the output, and at the output of the head. The position embedding begins at
    `first_position`.

    Raises UnsupportedModel as `describe_score_head` does.
    """
    dense, output = score_head
    if config.hidden_act not in _ACTIVATIONS or getattr(config, "is_decoder", False):
        return None
    has_head = has_score_head(config)
    prefix = f"{base}." if has_head else ""
    hidden, eps = config.hidden_size, config.layer_norm_eps
    return EncoderDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings - first_position,
        num_heads=config.num_attention_heads,
        activation=_ACTIVATIONS[config.hidden_act],
        word_embedding=f"{prefix}embeddings.word_embeddings.weight",
        position_embedding=f"{prefix}embeddings.position_embeddings.weight",
        first_position=first_position,
        type_embedding=f"{prefix}embeddings.token_type_embeddings.weight",
        num_types=config.type_vocab_size,
        embedding_norm=LayerNorm(f"{prefix}embeddings.LayerNorm", hidden, eps),
        layers=tuple(_layer(config, f"{prefix}encoder.layer.{number}") for number in range(config.num_hidden_layers)),
        # The pooler is for classes of sequences, which embeddings do not have; the positions are constants.
        unused_prefixes=(
            f"{prefix}pooler.",
            f"{prefix}embeddings.position_ids",
            *(["classifier."] if has_head else []),
        ),
        prefix="" if has_head else f"{base}.",
        score_head=describe_score_head(config, output, dense) if has_head else None,
    )


def describe_roberta(config: Any) -> EncoderDescription | None:
    """The description of RoBERTa and models of its form, as `describe_encoder`: positions begin after that of padding,
    and the head has a layer of its own in place of BERT's pooler.
    """
    head = ("classifier.dense", "classifier.out_proj")
    return describe_encoder(config, "roberta", head, first_position=config.pad_token_id + 1)


def _layer(config: Any, prefix: str) -> EncoderLayer:
    hidden, width, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
    attention, head_dim = f"{prefix}.attention", hidden // config.num_attention_heads
    projections = [f"{attention}.self.{part}" for part in ("query", "key", "value")]

    def linear(
        role: LinearRole, names: list[str], inputs: int, outputs: int, split: SplitDimension, unit: int = 1
    ) -> LinearLayer:
        stored = tuple(StoredLinear(name, (outputs,), bias=True) for name in names)
        return LinearLayer(role, inputs, stored, split, unit)

    by_outputs, by_inputs = SplitDimension.OUTPUTS, SplitDimension.INPUTS
    return EncoderLayer(
        qkv=linear(LinearRole.QKV, projections, hidden, hidden, by_outputs, head_dim),
        output=linear(LinearRole.ATTENTION_OUTPUT, [f"{attention}.output.dense"], hidden, hidden, by_inputs, head_dim),
        attention_norm=LayerNorm(f"{attention}.output.LayerNorm", hidden, eps),
        up=linear(LinearRole.GATE_UP, [f"{prefix}.intermediate.dense"], hidden, width, by_outputs),
        down=linear(LinearRole.DOWN, [f"{prefix}.output.dense"], width, hidden, by_inputs),
        mlp_norm=LayerNorm(f"{prefix}.output.LayerNorm", hidden, eps),
    )
