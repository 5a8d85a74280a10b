"""Describes encoders of BERT's form, whatever their configs and tensors are called."""

from dataclasses import replace
from typing import Any, NamedTuple

from worker_svc.model.describe_parts import ACTIVATIONS, describe_mlp
from worker_svc.model.describe_rope import context_length, ropes_of
from worker_svc.model.describe_score_head import describe_score_head, has_score_head
from worker_svc.model.description import (
    Activation,
    LinearLayer,
    LinearRole,
    MlpKind,
    RopeConfig,
    SplitDimension,
    StoredLinear,
)
from worker_svc.model.encoder_description import EncoderDescription, EncoderLayer, LayerNorm, RelativePositions
from worker_svc.model.score_head_description import DenseActivation


class EncoderNames(NamedTuple):
    """How an encoder's tensors are called, and which there are. Those of a layer begin with `layers` and its number."""

    base: str
    """What all of them begin with in a model with a head."""
    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """One name: a tensor has all three."""
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    gate_up: tuple[str, ...] = ("intermediate.dense",)
    """Of a gated MLP the gate, then up; one name: a tensor has both, up before the gate."""
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    embedding_norm: str = "embeddings.LayerNorm"
    is_gated: bool = False
    """Whether MLPs have a gate. It has no bias, nor has up."""
    has_biases: bool = True
    """Of the other linear layers."""


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
    context: int | None = None,
    first_position: int = 0,
    rope: RopeConfig | None = None,
    relative_positions: RelativePositions | None = None,
) -> EncoderDescription | None:
    """The description; None if an activation or another feature cannot be described.

    `eps` of norms, `activation`, `width` of the MLP, `num_types` of tokens and the length of the `context` are given
    where the config does not have them under BERT's names. The position embedding begins at `first_position`; with
    `rope` there is none. `relative_positions` has the tensor's name without `base`.

    Raises UnsupportedModel as `describe_score_head` does.
    """
    activation = config.hidden_act if activation is None else activation
    num_types = config.type_vocab_size if num_types is None else num_types
    if activation not in ACTIVATIONS or getattr(config, "is_decoder", False):
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
        context_length=config.max_position_embeddings - first_position if context is None else context,
        num_heads=config.num_attention_heads,
        word_embedding=f"{embeddings}.word_embeddings.weight",
        position_embedding=f"{embeddings}.position_embeddings.weight" if rope is None else None,
        first_position=first_position,
        type_embedding=f"{embeddings}.token_type_embeddings.weight" if num_types else None,
        num_types=num_types,
        embedding_norm=LayerNorm(f"{prefix}{names.embedding_norm}", hidden, eps),
        layers=tuple(
            _layer(config, names, f"{prefix}{names.layers}.{number}.", width, eps, ACTIVATIONS[activation])
            for number in range(config.num_hidden_layers)
        ),
        # The pooler is for classes of sequences, which embeddings do not have; the positions are constants.
        unused_prefixes=(
            f"{prefix}pooler.",
            f"{embeddings}.position_ids",
            *((f"{head.dense}.", f"{head.output}.") if has_head else ()),
        ),
        prefix="" if has_head else f"{names.base}.",
        rope=rope,
        relative_positions=relative_positions,
        score_head=describe_score_head(config, head.output, head.dense, head.activation) if has_head else None,
    )


def describe_rotary_encoder(config: Any, names: EncoderNames, head: HeadNames) -> EncoderDescription | None:
    """The description of an encoder with rotary positions, as `describe_encoder`."""
    head_dim = config.hidden_size // config.num_attention_heads
    ropes = ropes_of(config, head_dim)
    if ropes is None or (getattr(config, "head_dim", None) or head_dim) != head_dim:
        return None
    return describe_encoder(config, names, head, context=context_length(config, ropes), rope=ropes[0])


def describe_roberta(config: Any) -> EncoderDescription | None:
    """The description of RoBERTa and models of its form, as `describe_encoder`: positions begin after that of padding,
    and the head has a layer of its own in place of BERT's pooler.
    """
    return describe_encoder(config, EncoderNames("roberta"), HeadNames(), first_position=config.pad_token_id + 1)


def _layer(
    config: Any, names: EncoderNames, prefix: str, width: int, eps: float, activation: Activation
) -> EncoderLayer:
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads

    def stored(name: str, outputs: tuple[int, ...], *, has_bias: bool = names.has_biases) -> StoredLinear:
        return StoredLinear(f"{prefix}{name}", outputs, has_bias)

    if len(names.qkv) == 1:
        qkv: tuple[StoredLinear, ...] = (stored(names.qkv[0], (hidden,) * 3),)
    else:
        qkv = tuple(stored(name, (hidden,)) for name in names.qkv)
    if not names.is_gated:
        gate_up: tuple[StoredLinear, ...] = (stored(names.gate_up[0], (width,)),)
    elif len(names.gate_up) == 1:
        gate_up = (replace(stored(names.gate_up[0], (width,) * 2, has_bias=False), reversed=True),)
    else:
        gate_up = tuple(stored(name, (width,), has_bias=False) for name in names.gate_up)
    output = (stored(names.output, (hidden,)),)
    kind = MlpKind.GATED if names.is_gated else MlpKind.PLAIN
    return EncoderLayer(
        qkv=LinearLayer(LinearRole.QKV, hidden, qkv, SplitDimension.OUTPUTS, head_dim),
        output=LinearLayer(LinearRole.ATTENTION_OUTPUT, hidden, output, SplitDimension.INPUTS, head_dim),
        attention_norm=LayerNorm(f"{prefix}{names.attention_norm}", hidden, eps),
        mlp=describe_mlp(kind, gate_up, stored(names.down, (hidden,)), activation),
        mlp_norm=LayerNorm(f"{prefix}{names.mlp_norm}", hidden, eps),
    )
