"""Describes rotary positions, given `rope_parameters` of transformers' config."""

import math
from collections.abc import Mapping
from typing import Any

from worker_svc.model.description import RopeConfig, RopeKind, require


def ropes_of(config: Any, head_dim: int, *, partial: bool = False) -> tuple[RopeConfig, ...] | None:
    """The rotary positions of each layer. None: a description cannot hold them.

    `partial` is whether the architecture's code rotates a part of each head, if the config says so.
    """
    # transformers does this again when it computes frequencies: fields beside `rope_parameters` win then.
    if hasattr(config, "standardize_rope_params"):
        config.standardize_rope_params()
    parameters = config.rope_parameters
    num_layers: int = config.num_hidden_layers
    # Parameters may be those of all layers, or by the kinds of layers.
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    of_kinds = {
        kind: rope_config(parameters.get(kind, parameters), config.max_position_embeddings, head_dim, partial=partial)
        for kind in set(kinds)
    }
    ropes = tuple(rope for kind in kinds if (rope := of_kinds[kind]) is not None)
    return ropes if len(ropes) == num_layers else None


def context_length(config: Any, ropes: tuple[RopeConfig, ...]) -> int:
    """How many tokens a sequence may have. Where frequencies would change beyond the original context, as with
    LONGROPE, it ends there: keys in the cache would have to change with them.
    """
    originals = [rope.original_context_length for rope in ropes if rope.kind is RopeKind.LONGROPE]
    length: int = config.max_position_embeddings
    return min([length, *originals])


def rope_config(
    rope: Mapping[str, Any] | None, max_positions: int, head_dim: int, *, partial: bool = False
) -> RopeConfig | None:
    """The description of `rope_parameters`. None: a description cannot hold them. Raises InvalidDescription where
    frequencies cannot be computed of their numbers.
    """
    if rope is None:
        return None
    kinds = {kind.value: kind for kind in RopeKind}
    kind = kinds.get(rope.get("rope_type", "default"))
    share = _positive("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    turned_share = 1.0
    if kind is RopeKind.PROPORTIONAL:
        share, turned_share = 1.0, share
        require(turned_share <= 1, "partial_rotary_factor", f"at most 1, not {turned_share}")
    rotated = int(head_dim * share)
    if kind is None or (share != 1.0 and not partial) or rotated % 2 or not rotated:
        return None
    theta = _positive("rope_theta", rope.get("rope_theta"))
    require(
        kind is not RopeKind.YARN or theta != 1, "rope_theta", "other than 1 with yarn, which divides by its logarithm"
    )
    _positive("max_position_embeddings", max_positions)
    original = rope.get("original_max_position_embeddings") or max_positions
    _positive("original_max_position_embeddings", original)
    given = rope.get("factor")
    other = 1.0 if kind is RopeKind.PROPORTIONAL else max_positions / original
    factor = _positive("factor", other if given is None else given)
    pair_factors: tuple[float, ...] = ()
    if kind is RopeKind.LONGROPE:
        pair_factors = tuple(_positive("short_factor", one) for one in rope["short_factor"])
        require(len(pair_factors) == rotated // 2, "short_factor", f"{rotated // 2} numbers")
    low_factor, high_factor = 1.0, 1.0
    if kind is RopeKind.LLAMA3:
        low_factor = _positive("low_freq_factor", rope.get("low_freq_factor"))
        high_factor = _positive("high_freq_factor", rope.get("high_freq_factor"))
        holds = high_factor > low_factor
        require(holds, "high_freq_factor", f"above low_freq_factor, which is {low_factor}, not {high_factor}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        turned_share=turned_share,
        original_context_length=original,
        low_freq_factor=low_factor,
        high_freq_factor=high_factor,
        beta_fast=_positive("beta_fast", rope.get("beta_fast") or 32.0),
        beta_slow=_positive("beta_slow", rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_attention_factor(kind, rope, factor, original),
        rotated_dims=None if rotated == head_dim else rotated,
        pair_factors=pair_factors,
    )


def _positive(name: str, value: Any) -> float:
    """A parameter's value. Raises InvalidDescription, with its name, unless it is a number above 0."""
    holds = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    require(holds, name, f"a number above 0, not {value!r}")
    number: float = value
    return number


def _attention_factor(kind: RopeKind, rope: Mapping[str, Any], factor: float, original: int) -> float:
    """The config's own, or that of the kind."""
    if kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    given = rope.get("attention_factor")
    if given is not None:
        return float(_positive("attention_factor", given))
    if kind is RopeKind.YARN:
        return _yarn_temperature(rope, factor)
    # arXiv:2402.13753, as Phi-3's code has it
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_temperature(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv:2309.00071, equation 22), by the config's own weights where it has them."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        weights = _positive("mscale", mscale), _positive("mscale_all_dim", mscale_all_dim)
        return temperature(weights[0]) / temperature(weights[1])
    return temperature(1.0)
