"""Describes the factors of Granite's configs: of embeddings, of what layers add, of scores and of logits."""

from dataclasses import replace
from typing import Any

from worker_svc.model.description import DecoderLayer, ModelDescription, Norm


def with_factors(description: ModelDescription, config: Any) -> ModelDescription | None:
    """The description of a decoder with norms before attention and MLP, with the factors of its config.

    None: a factor is missing, or not above 0.
    """
    factors = config.residual_multiplier, config.attention_multiplier, config.logits_scaling
    if any(factor is None or factor <= 0 for factor in factors):
        return None
    residual, scale, divisor = map(float, factors)

    # Hidden states are those of transformers, divided by the factor of what is added to them. The norm of x / f with
    # the epsilon e / f**2 is that of x with e.
    def norm(described: Norm) -> Norm:
        return replace(described, eps=described.eps / residual**2)

    def layer(described: DecoderLayer) -> DecoderLayer:
        assert described.attention_norm is not None
        assert described.mlp_norm is not None
        return replace(
            described,
            attention_norm=norm(described.attention_norm),
            attention=replace(described.attention, scale=scale),
            mlp_norm=norm(described.mlp_norm),
        )

    return replace(
        description,
        layers=tuple(map(layer, description.layers)),
        norm=norm(description.norm),
        embedding_scale=config.embedding_multiplier / residual,
        logits_scale=1 / divisor,
    )
