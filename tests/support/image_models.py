"""Tiny configs of models that also take images, and their continuations of text alone by transformers' own classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Cohere2Config,
    Cohere2VisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    GraniteConfig,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

import llama_models
from dense_models import _GEMMA, _GEMMA3_ROPES, _GEMMA4, _GEMMA4_SMALL, _GRANITE, _MINISTRAL3, _SIZES, WINDOW

_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_CLIP: dict[str, Any] = {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
_SIGLIP: dict[str, Any] = {**_TOWER, "model_type": "siglip_vision_model"}
_PIXTRAL: dict[str, Any] = {**_TOWER, "model_type": "pixtral", "head_dim": 16}
_INTERN: dict[str, Any] = {**_TOWER, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
_QWEN: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
_QWEN2: dict[str, Any] = {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
_QWEN3: dict[str, Any] = {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16,
}  # fmt: skip
_GEMMA4_UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32,
}  # fmt: skip
_GEMMA4_TOKENS: dict[str, Any] = {
    "image_token_id": 300, "video_token_id": 301, "audio_token_id": 302, "boi_token_id": 303, "eoi_token_id": 304,
    "boa_token_id": 305, "eoa_token_index": 306,
}  # fmt: skip
# No token of the tests' vocabulary.
_IMAGE: dict[str, Any] = {"image_token_id": 300}
_VIDEO: dict[str, Any] = {
    **_IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303,
}  # fmt: skip
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}


def _qwen2_text(**fields: Any) -> dict[str, Any]:
    return _SIZES | {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}} | fields


def _qwen3_text(**fields: Any) -> dict[str, Any]:
    rope = {**_ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return _SIZES | {"head_dim": 32, "rope_parameters": rope} | fields


def _gemma3_text() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3}, **_GEMMA, rope_parameters=_GEMMA3_ROPES,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip


def _gemma4_text(**fields: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**_GEMMA4_SMALL | fields)


def _ministral3_text(**fields: Any) -> Ministral3Config:
    return Ministral3Config(**_SIZES | fields, head_dim=32, rope_parameters=dict(_MINISTRAL3))


UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
VARIANTS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=_gemma3_text(), vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=300,
        boi_token_index=301, eoi_token_index=302, **UNTIED,
    ),
    "gemma3-tied": lambda: Gemma3Config(
        text_config=_gemma3_text(), vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=300, **_TIED
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=_gemma4_text(), vision_config=_GEMMA4_VISION, audio_config=None, **_GEMMA4_TOKENS, **UNTIED
    ),
    "gemma4-tied": lambda: Gemma4Config(
        text_config=_gemma4_text(**_TIED), vision_config=_GEMMA4_VISION, audio_config=None, **_GEMMA4_TOKENS, **_TIED
    ),
    "gemma4-unified": lambda: Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**_GEMMA4), vision_config=_GEMMA4_UNIFIED_VISION,
        audio_config={"audio_embed_dim": 32}, **_GEMMA4_TOKENS, **UNTIED,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**_SIZES, head_dim=32, sliding_window=None), vision_config=_PIXTRAL,
        image_token_index=300, **UNTIED,
    ),
    "mistral3-ministral": lambda: Mistral3Config(
        text_config=_ministral3_text(), vision_config=_PIXTRAL, image_token_index=300, **UNTIED
    ),
    "mistral3-ministral-tied": lambda: Mistral3Config(
        text_config=_ministral3_text(**_TIED), vision_config=_PIXTRAL, image_token_index=300, **_TIED
    ),
    "qwen2-vl": lambda: Qwen2VLConfig(text_config=_qwen2_text(), vision_config=_QWEN2, **_VIDEO),
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(
        text_config=_qwen2_text(
            use_sliding_window=True, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config=_QWEN, **_VIDEO,
    ),
    "qwen2.5-vl-tied": lambda: Qwen2_5_VLConfig(text_config=_qwen2_text(), vision_config=_QWEN, **_VIDEO, **_TIED),
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config=_qwen3_text(attention_bias=True), vision_config=_QWEN3, **_VIDEO, **UNTIED
    ),
    "qwen3-vl-tied": lambda: Qwen3VLConfig(text_config=_qwen3_text(), vision_config=_QWEN3, **_VIDEO, **_TIED),
    "qwen3-vl-moe": lambda: Qwen3VLMoeConfig(
        text_config=_qwen3_text(
            num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, mlp_only_layers=[0]
        ),
        vision_config=_QWEN3, **_VIDEO, **UNTIED,
    ),
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**_SIZES, head_dim=32), vision_config=_CLIP, image_token_index=300
    ),
    "llava-of-qwen": lambda: LlavaConfig(
        text_config=Qwen2Config(**_SIZES | _TIED), vision_config=_SIGLIP, image_token_index=300
    ),
    "llava-of-phi": lambda: LlavaConfig(
        text_config=PhiConfig(**_SIZES | {"hidden_size": 64, "num_attention_heads": 2}), vision_config=_CLIP,
        image_token_index=300,
    ),
    "llava-next": lambda: LlavaNextConfig(
        text_config=MistralConfig(**_SIZES, head_dim=32, sliding_window=WINDOW), vision_config=_CLIP,
        image_token_index=300,
    ),
    "granite-vision": lambda: LlavaNextConfig(
        text_config=GraniteConfig(**_SIZES, **_GRANITE), vision_config=_SIGLIP, image_token_index=300
    ),
    "llava-onevision": lambda: LlavaOnevisionConfig(
        text_config=Qwen2Config(**_SIZES), vision_config=_SIGLIP, image_token_index=300, video_token_index=301
    ),
    "internvl": lambda: InternVLConfig(
        text_config=Qwen3Config(**_SIZES, head_dim=32), vision_config=_INTERN, **_IMAGE, **UNTIED
    ),
    "aya-vision": lambda: AyaVisionConfig(
        text_config=Cohere2Config(
            **_SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], logit_scale=0.5
        ),
        vision_config=_SIGLIP, image_token_index=300, **UNTIED,
    ),
    "command-a-vision": lambda: Cohere2VisionConfig(
        text_config=Cohere2Config(
            **_SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], logit_scale=0.5
        ),
        vision_config=_SIGLIP, alignment_intermediate_size=32, **_IMAGE, **_TIED,
    ),
    "idefics3": lambda: Idefics3Config(
        text_config=LlamaConfig(**_SIZES, head_dim=32), vision_config=_TOWER, **_IMAGE, **UNTIED
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config=LlamaConfig(**_SIZES | _TIED, head_dim=32), vision_config=_TOWER, **_IMAGE, **_TIED
    ),
}  # fmt: skip


def save(directory: Path, config: Any, **options: Any) -> Path:
    """Writes a random model of a config."""
    return llama_models.save_model(directory, config, AutoModelForImageTextToText, **options)


def generate(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers' own generate in float32, one prompt at a time."""
    return llama_models.generate(directory, prompts, num_tokens, kind=AutoModelForImageTextToText)
