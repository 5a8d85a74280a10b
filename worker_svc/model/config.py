"""What a model of the Llama family is made of, read from its config.json."""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from worker_svc.errors import CannotServe

_FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class UnsupportedModel(CannotServe):
    """A model that cannot be served. The text is for the operator and says what can."""


class RopeKind(Enum):
    """How the frequencies of rotary positions are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base, and the scaling of its kind (the last three for LLAMA3 alone)."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_length: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants of a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.head_dim**-0.5)


def read_model_config(directory: Path) -> ModelConfig:
    """The config of the model in a directory. Raises UnsupportedModel, naming what is not supported."""
    raw = json.loads((directory / "config.json").read_text())
    kind = raw.get("model_type", "")
    architectures = raw.get("architectures") or [_FAMILY.get(kind, kind)]
    if kind not in _FAMILY or architectures != [_FAMILY[kind]]:
        raise UnsupportedModel(
            f"the model in {directory} is of the architecture {', '.join(architectures) or 'unknown'}; "
            f"supported are {', '.join(_FAMILY.values())}"
        )
    if "quantization_config" in raw:
        raise UnsupportedModel(f"the model in {directory} has quantized weights, which are not supported")

    # What config.json leaves out, transformers knows.
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    _check_variant(config, directory)
    num_heads = config.num_attention_heads
    attention_bias = getattr(config, "attention_bias", False)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        context_length=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        qkv_bias=attention_bias or kind == "qwen2",
        output_bias=attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        qk_norm=kind == "qwen3",
        rope=_rope_config(config.rope_parameters, config.max_position_embeddings, directory),
    )


def _check_variant(config: Any, directory: Path) -> None:
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"the model in {directory} uses the activation {config.hidden_act}; supported is silu")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is not None and slides and window < config.max_position_embeddings:
        raise UnsupportedModel(
            f"the model in {directory} attends to a sliding window of {window} tokens, which is not supported"
        )


def _rope_config(rope: dict[str, Any], context_length: int, directory: Path) -> RopeConfig:
    kinds = {kind.value: kind for kind in RopeKind}
    name = rope.get("rope_type", "default")
    if name not in kinds or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"the model in {directory} uses rotary positions of the kind {name}"
            f"{', on a part of each head' if name in kinds else ''}; supported are {', '.join(kinds)}"
        )
    return RopeConfig(
        kind=kinds[name],
        theta=rope["rope_theta"],
        factor=rope.get("factor", 1.0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 1.0),
        original_context_length=rope.get("original_max_position_embeddings") or context_length,
    )
