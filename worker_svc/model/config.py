"""What a model is made of, read from its config.json: of the Llama family all that the native modules need."""

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from worker_svc.errors import StartupFailed
from worker_svc.model.layout import LayerAttention, ModelLayout

_FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class UnsupportedModel(StartupFailed):
    """A model that cannot be served. The text is for the operator and says what can."""


class RopeKind(Enum):
    """How the frequencies of rotary positions are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: base, and the scaling of its kind."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    """All kinds but DEFAULT."""
    original_context_length: int = 0
    """LLAMA3 and YARN."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """LLAMA3."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YARN: whether the dimensions at which blending begins and ends are rounded outwards."""
    attention_factor: float = 1.0
    """What turned queries and keys are multiplied by; other than 1 for YARN alone."""


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
    windows: tuple[int | None, ...]
    """Of each layer, how many keys up to its own a query sees; None: all."""

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return float(self.head_dim**-0.5)

    @property
    def layout(self) -> ModelLayout:
        """What the rest of the worker must know."""
        layers = tuple(LayerAttention(self.attention_scale, window) for window in self.windows)
        return ModelLayout(self.vocab_size, self.context_length, self.num_kv_heads, self.head_dim, layers)


def read_config(directory: Path) -> Any:
    """The config of the model in a directory, with all that config.json leaves out, as transformers has it.

    Raises UnsupportedModel where transformers does not know the architecture, or the weights are quantized.
    """
    raw = json.loads((directory / "config.json").read_text())
    if "quantization_config" in raw:
        raise UnsupportedModel(f"the model in {directory} has quantized weights, which are not supported")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        named = ", ".join(raw.get("architectures") or [raw.get("model_type") or "unknown"])
        raise UnsupportedModel(
            f"the model in {directory} is of the architecture {named}, which the installed transformers does not know"
        ) from error


def native_config(config: Any) -> ModelConfig | None:
    """What the native modules need to know of a model, given transformers' config; None: they do not compute it."""
    kind = config.model_type
    if kind not in _FAMILY or config.architectures not in (None, [_FAMILY[kind]]) or config.hidden_act != "silu":
        return None
    rope = _rope_config(config.rope_parameters, config.max_position_embeddings)
    if rope is None:
        return None
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
        rope=rope,
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return (None,) * num_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_config(rope: dict[str, Any], context_length: int) -> RopeConfig | None:
    kinds = {kind.value: kind for kind in RopeKind}
    kind = kinds.get(rope.get("rope_type", "default"))
    if kind is None or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    original = rope.get("original_max_position_embeddings") or context_length
    factor = rope.get("factor") or context_length / original
    return RopeConfig(
        kind=kind,
        theta=rope["rope_theta"],
        factor=factor,
        original_context_length=original,
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 1.0),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
        attention_factor=_attention_factor(rope, factor) if kind is RopeKind.YARN else 1.0,
    )


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv:2309.00071, equation 22), by the config's own weights where it has them."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
