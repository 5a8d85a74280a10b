"""Describes encoders of BERT's form, whatever their configs and tensors are called."""

from dataclasses import replace
from typing import Any, NamedTuple

from worker_svc.model.describe_score_head import describe_score_head, has_score_head
from worker_svc.model.description import Activation, LinearLayer, LinearRole, SplitDimension, StoredLinear
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm, RelativePositions
from worker_svc.model.score_head_description import DenseActivation

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


class EncoderNames(NamedTuple):
    """How an encoder's tensors are called. Those of a layer begin with `layers` and its number."""

    base: str
    """What all of them begin with in a model with a head."""
    layers: str = "encoder.layer"
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


class HeadNames(NamedTuple):
    """The linear layers of a head, before its output and at its output, and the function between them."""

    dense: str = "classifier.dense"
    output: str = "classifier.out_proj"
    activation: DenseActivation = DenseActivation.TANH


def describe_encoder(
    config: Any,
    names: EncoderNames,
    head: HeadNames,
    *,
    eps: float | None = None,
    activation: str | None = None,
    width: int | None = None,
    num_types: int | None = None,
    first_position: int = 0,
    relative_positions: RelativePositions | None = None,
) -> EncoderDescription | None:
    """The description; None if an activation or another feature cannot be described.

    `eps` of norms, `activation`, `width` of the MLP and `num_types` of tokens are given where the config does not have
    them under BERT's names. The position embedding begins at `first_position`; `relative_positions` has the tensor's
    name without `base`.

    Raises UnsupportedModel as `describe_score_head` does.
    """
    activation = config.hidden_act if activation is None else activation
    num_types = config.type_vocab_size if num_types is None else num_types
    if activation not in _ACTIVATIONS or getattr(config, "is_decoder", False):
        return None
    has_head = has_score_head(config)
    prefix = f"{names.base}." if has_head else ""
    embeddings, hidden = f"{prefix}embeddings", config.hidden_size
    eps = config.layer_norm_eps if eps is None else eps
    width = config.intermediate_size if width is None else width
    if relative_positions is not None:
        relative_positions = replace(relative_positions, weight=f"{prefix}{relative_positions.weight}")
    return EncoderDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings - first_position,
        num_heads=config.num_attention_heads,
        activation=_ACTIVATIONS[activation],
        word_embedding=f"{embeddings}.word_embeddings.weight",
        position_embedding=f"{embeddings}.position_embeddings.weight",
        first_position=first_position,
        type_embedding=f"{embeddings}.token_type_embeddings.weight" if num_types else None,
        num_types=num_types,
        embedding_norm=LayerNorm(f"{embeddings}.LayerNorm", hidden, eps),
        layers=tuple(
            _layer(config, names, f"{prefix}{names.layers}.{number}.", width, eps)
            for number in range(config.num_hidden_layers)
        ),
        # The pooler is for classes of sequences, which embeddings do not have; the positions are constants.
        unused_prefixes=(
            f"{prefix}pooler.",
            f"{embeddings}.position_ids",
            *((f"{head.dense}.", f"{head.output}.") if has_head else ()),
        ),
        prefix="" if has_head else f"{names.base}.",
        relative_positions=relative_positions,
        score_head=describe_score_head(config, head.output, head.dense, head.activation) if has_head else None,
    )


def describe_roberta(config: Any) -> EncoderDescription | None:
    """The description of RoBERTa and models of its form, as `describe_encoder`: positions begin after that of padding,
    and the head has a layer of its own in place of BERT's pooler.
    """
    return describe_encoder(config, EncoderNames("roberta"), HeadNames(), first_position=config.pad_token_id + 1)


def _layer(config: Any, names: EncoderNames, prefix: str, width: int, eps: float) -> EncoderLayer:
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads

    def linear(
        role: LinearRole, parts: tuple[str, ...], inputs: int, outputs: int, split: SplitDimension, unit: int = 1
    ) -> LinearLayer:
        stored = tuple(StoredLinear(f"{prefix}{name}", (outputs,), bias=True) for name in parts)
        return LinearLayer(role, inputs, stored, split, unit)

    by_outputs, by_inputs = SplitDimension.OUTPUTS, SplitDimension.INPUTS
    projections = (names.query, names.key, names.value)
    return EncoderLayer(
        qkv=linear(LinearRole.QKV, projections, hidden, hidden, by_outputs, head_dim),
        output=linear(LinearRole.ATTENTION_OUTPUT, (names.output,), hidden, hidden, by_inputs, head_dim),
        attention_norm=LayerNorm(f"{prefix}{names.attention_norm}", hidden, eps),
        up=linear(LinearRole.GATE_UP, (names.up,), hidden, width, by_outputs),
        down=linear(LinearRole.DOWN, (names.down,), width, hidden, by_inputs),
        mlp_norm=LayerNorm(f"{prefix}{names.mlp_norm}", hidden, eps),
    )
