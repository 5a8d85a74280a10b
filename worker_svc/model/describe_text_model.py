"""Describes the text model of models that also take images: a decoder whose tensors are called otherwise."""

from dataclasses import replace

from worker_svc.model.describe_parts import describe_head
from worker_svc.model.description import ModelDescription

# What these models call the module of their text model. Earlier releases of transformers wrote its class with the head
# there (`language_model.model.layers`, `language_model.lm_head`), later ones the class without it, within the model
# (`model.language_model.layers`, `lm_head`).
_TEXT_MODELS = ("language_model", "text_model")
# First parts of the names of what images and sound need, which text alone does not.
_OF_IMAGES = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline",
    "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.",
)  # fmt: skip


def of_text_model(decoder: ModelDescription, model_type: str, *, has_soft_cap: bool) -> ModelDescription | None:
    """The description of a text model as that of the whole model, which is of this `model_type`. None: its tokens see
    later ones, which only the classes without images do. `has_soft_cap`: whether its logits keep their soft cap.
    """
    if decoder.is_bidirectional:
        return None
    prefix = decoder.embedding.partition(".")[0]
    renamed = [
        names
        for module in _TEXT_MODELS
        for names in (
            (f"{module}.{prefix}.", f"{prefix}."),
            (f"{module}.lm_head.", "lm_head."),
            (f"model.{module}.", f"{prefix}."),
            (f"{module}.", f"{prefix}."),
        )
    ]
    return replace(
        decoder,
        architecture=model_type,
        # The head is one of the whole model: it has no bias, and its logits have no factor and most often no cap.
        head=describe_head(decoder.hidden_size, decoder.vocab_size),
        logits_scale=1.0,
        logits_soft_cap=decoder.logits_soft_cap if has_soft_cap else None,
        renamed=(*renamed, *decoder.renamed),
        unused_prefixes=(*decoder.unused_prefixes, *_OF_IMAGES, *(f"model.{name}" for name in _OF_IMAGES)),
    )
