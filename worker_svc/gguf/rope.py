"""Reads the rotary positions of a GGUF file into transformers' `rope_parameters`, as llama.cpp computes them."""

import math
from dataclasses import dataclass
from typing import Any

from worker_svc.gguf.metadata import GgufMetadata

# What the frequency of each pair of dimensions is divided by: always, and up to the original context and beyond it.
_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_KINDS = ("none", "linear", "yarn", "longrope")
_OF_ATTENTION = ("attn_factor", "yarn_attn_factor")
_THETA = 10_000.0  # of files that have none


@dataclass(frozen=True, slots=True)
class RopeForm:
    """How the rotary positions of an architecture are computed, as its file does not say."""

    is_partial: bool = False
    """Whether its code may rotate a part of each head. It may if the config's default has `partial_rotary_factor`."""
    window_theta: float | None = None
    """The base of layers with a window, if others have positions of their own and the file does not say it. None: it
    is the base of all layers.
    """
    truncates: bool = True
    """Whether the dimensions at which YaRN's blending begins and ends are rounded."""
    has_two_contexts: bool = False
    """Whether the config has the original context beside the parameters, and prefers it, and positions are of the kind
    `longrope` alone if they are scaled: Phi 3's.
    """


def read_rope(metadata: GgufMetadata, config: Any, head_dim: int, form: RopeForm) -> None:
    """Sets `rope_parameters`. Raises PreparationFailed for positions that they cannot hold."""
    given = config.rope_parameters
    rope = _scaled(metadata, config.max_position_embeddings)
    if rope["rope_type"] == "yarn" and not form.truncates:
        rope["truncate"] = False
    if "full_attention" in given:
        # Positions are scaled where all keys are seen, and may have another base where there is a window.
        default = rope["rope_theta"] if form.window_theta is None else form.window_theta
        theta = float(metadata.get("rope.freq_base_swa") or default)
        given["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
        given["full_attention"] = rope
        if metadata.peek("rope.dimension_count") == head_dim:
            metadata.get("rope.dimension_count")
        return
    if metadata.peek("rope.freq_base_swa") == metadata.peek("rope.freq_base"):
        metadata.get("rope.freq_base_swa")
    rotated = metadata.peek("rope.dimension_count") or head_dim
    is_partial = form.is_partial or "partial_rotary_factor" in given
    if is_partial:
        share = rotated / head_dim
        # transformers rounds the product down.
        rope["partial_rotary_factor"] = share if int(head_dim * share) == rotated else (rotated + 0.5) / head_dim
    if is_partial or rotated == head_dim:
        metadata.get("rope.dimension_count")
    if len(rope.get("short_factor", ())) not in (0, rotated // 2):
        raise metadata.refusal(f"its factors of rotary positions are not {rotated // 2} numbers")
    if form.has_two_contexts:
        if rope["rope_type"] not in ("default", "longrope"):
            raise metadata.not_read("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
        config.original_max_position_embeddings = rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        )
    config.rope_parameters = rope


def _scaled(metadata: GgufMetadata, context: int) -> dict[str, Any]:
    """Base and scaling of the positions."""
    theta = float(metadata.get("rope.freq_base") or _THETA)
    kind = metadata.get("rope.scaling.type") or "linear"
    if kind not in _KINDS:
        raise metadata.refusal(f"its rotary positions are scaled by {kind!r}; what is read: {', '.join(_KINDS)}")
    # Both names are in use; 0 means none.
    factors = [metadata.get(name) for name in ("rope.scaling.factor", "rope.scale_linear")]
    factor = float(next(filter(None, factors), 1.0)) if kind != "none" else 1.0
    original = int(metadata.get("rope.scaling.original_context_length") or context)
    attention, yarn_attention = (_factor_of_attention(metadata, f"rope.scaling.{name}") for name in _OF_ATTENTION)
    of_pairs = _pair_factors(metadata, kind, factor)
    if of_pairs is not None:
        short, long = of_pairs
        original = context if short == long else original
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": short,
            "long_factor": long,
            "factor": max(context / original, 1.0),
            "original_max_position_embeddings": original,
            "attention_factor": attention * yarn_attention,
        }
    yarn = _yarn(metadata, factor)
    if factor == 1.0 or kind != "yarn":
        if attention * yarn_attention != 1.0:
            raise metadata.not_read(*(f"rope.scaling.{name}" for name in _OF_ATTENTION))
        scaling = {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        return {**scaling, "rope_theta": theta}
    # transformers takes this factor, where a config has one, in place of YaRN's temperature; llama.cpp does not use it.
    if yarn_attention != 1.0 and not math.isclose(yarn_attention, yarn["attention_factor"], rel_tol=1e-3):
        raise metadata.not_read("rope.scaling.yarn_attn_factor")
    yarn["attention_factor"] *= attention
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        **yarn,
    }


def _factor_of_attention(metadata: GgufMetadata, name: str) -> float:
    value = metadata.get(name) or 1.0
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise metadata.not_read(name)
    return float(value)


def _pair_factors(metadata: GgufMetadata, kind: str, factor: float) -> tuple[list[float], list[float]] | None:
    """What frequencies are divided by, up to the original context and beyond it; None: the file has no such tensors."""
    always, short, long = map(metadata.factors, _TENSORS)
    if always is not None:  # Llama 3
        if kind not in ("none", "linear"):
            raise metadata.not_read("rope.scaling.type")
        factors = [each * factor for each in always]
        return factors, factors
    if short is None and long is None and kind != "longrope":
        return None
    if short is None or long is None:
        raise metadata.refusal(f"it does not have both tensors {_TENSORS[1]} and {_TENSORS[2]}")
    if factor != 1.0:
        raise metadata.not_read("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
    return short, long


def _yarn(metadata: GgufMetadata, factor: float) -> dict[str, Any]:
    """The fields of YaRN, which change nothing with other kinds."""
    if metadata.get("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        raise metadata.not_read("rope.scaling.yarn_ext_factor")
    return {
        "beta_fast": float(metadata.get("rope.scaling.yarn_beta_fast") or 32.0),
        "beta_slow": float(metadata.get("rope.scaling.yarn_beta_slow") or 1.0),
        "attention_factor": 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0,
    }
