"""Describes layers with norms after attention and MLP in place of those before, as OLMo 2's."""

from dataclasses import replace

from worker_svc.model.description import DecoderLayer, ModelDescription


def with_post_norms(description: ModelDescription) -> ModelDescription:
    """The description of a decoder that is named as Llama, with such layers."""
    return replace(description, layers=tuple(map(_layer, description.layers)))


def _layer(described: DecoderLayer) -> DecoderLayer:
    # Llama's name of the norm before the MLP is here that of the one after attention.
    after_attention = described.mlp_norm
    assert after_attention is not None
    prefix = after_attention.tensor.removesuffix("post_attention_layernorm.weight")
    return replace(
        described,
        attention_norm=None,
        post_attention_norm=after_attention,
        mlp_norm=None,
        post_mlp_norm=replace(after_attention, tensor=f"{prefix}post_feedforward_layernorm.weight"),
    )
