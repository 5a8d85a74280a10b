"""Describes whether the tokens of a decoder see later ones, as those of embedding models made of decoders do."""

from dataclasses import replace
from typing import Any

from worker_svc.model.description import DecoderLayer, ModelDescription


def with_directions(description: ModelDescription, config: Any) -> ModelDescription:
    """The description with attention in both directions if the config says so: `is_causal` of any decoder, or Gemma 3's
    `use_bidirectional_attention`; Gemma 4 has it for images alone. The same one if its architecture has said so.
    """
    if description.is_bidirectional:
        return description
    every_decoder = getattr(config, "is_causal", True) is False
    if not every_decoder and getattr(config, "use_bidirectional_attention", False) is not True:
        return description

    # With `is_causal`, transformers counts a window without the query's own key; Gemma's is halved by its config.
    return in_both_directions(description, widened=int(every_decoder))


def in_both_directions(description: ModelDescription, widened: int = 0) -> ModelDescription:
    """The description with tokens that see later ones, too. Windows are `widened` by so many keys."""

    def layer(described: DecoderLayer) -> DecoderLayer:
        window = described.attention.window
        seen = None if window is None else window + widened
        return replace(described, attention=replace(described.attention, window=seen, bidirectional=True))

    return replace(description, layers=tuple(map(layer, description.layers)))
