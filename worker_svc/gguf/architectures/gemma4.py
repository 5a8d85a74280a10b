"""Gemma 4, whose layers differ: files have the text model alone."""

import re
from collections.abc import Sequence
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.metadata import GgufMetadata

_ROPE_FACTORS = "rope_freqs.weight"
# What the frequency of a pair of dimensions that stays is divided by, at least.
_STAYS = 1e20
_HEAD = re.compile(r"output\.weight")


def _read_config(metadata: GgufMetadata) -> Any:
    from transformers import Gemma4TextConfig

    metadata.check_sizes()
    get, needed = metadata.get, metadata.needed
    num_layers: int = needed("block_count")
    num_shared: int = get("attention.shared_kv_layers") or 0
    kinds = _kinds(metadata, num_layers)
    values_are_keys = _values_are_keys(metadata, kinds[: num_layers - num_shared])
    of_sliding, of_full = _kv_heads(metadata, kinds, values_are_keys=values_are_keys)
    width, of_shared = _widths(metadata, num_layers, num_shared)
    vocab_size = metadata.num_rows("token_embd.weight")
    get("vocab_size")  # that of these rows
    num_experts: int = get("expert_count") or 0
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": needed("embedding_length"),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input") or 0,
        "intermediate_size": width,
        "use_double_wide_mlp": of_shared != width,
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_shared,
        "layer_types": kinds,
        "num_attention_heads": needed("attention.head_count"),
        "num_key_value_heads": of_sliding,
        "num_global_key_value_heads": None if of_full == of_sliding else of_full,
        "head_dim": _head_dim(metadata, "_swa"),
        "global_head_dim": _head_dim(metadata, ""),
        "attention_k_eq_v": values_are_keys,
        "sliding_window": needed("attention.sliding_window"),
        "rope_parameters": _ropes(metadata),
        "max_position_embeddings": needed("context_length"),
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": get("final_logit_softcapping") or None,
        "tie_word_embeddings": not metadata.has_tensor(_HEAD),
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts or None,
        "top_k_experts": get("expert_used_count") or None,
        "moe_intermediate_size": get("expert_feed_forward_length"),
        **{f"{name}_token_id": metadata.general(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
    }
    return Gemma4TextConfig(**fields)


def _values_are_keys(metadata: GgufMetadata, kinds: Sequence[str]) -> bool:
    """Whether layers without a window have no values, of those that have keys: they are the first ones, of `kinds`."""
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    have_values = {metadata.has_tensor(re.compile(rf"blk\.{number}\.attn_v\.weight")) for number in full}
    if len(have_values) > 1:
        raise metadata.refusal("some of its layers without a window have values, and others do not")
    return have_values == {False}


def _kv_heads(metadata: GgufMetadata, kinds: Sequence[str], *, values_are_keys: bool) -> tuple[int, int]:
    """The KV heads of layers with a window, and of those without one. transformers has them differ only where values
    are keys.
    """
    name = "attention.head_count_kv"
    counts = set(zip(kinds, _each(metadata, name, len(kinds)), strict=True))
    of_kinds = dict(counts)
    if len(of_kinds) < len(counts) or (len(set(of_kinds.values())) > 1 and not values_are_keys):
        raise metadata.not_read(name)
    of_full = of_kinds["full_attention"]
    return of_kinds.get("sliding_attention", of_full), of_full


def _widths(metadata: GgufMetadata, num_layers: int, num_shared: int) -> tuple[int, int]:
    """The width of MLPs, and that of layers that share keys and values, which may be twice as wide."""
    name = "feed_forward_length"
    widths = _each(metadata, name, num_layers)
    own, shared = set(widths[: num_layers - num_shared]), set(widths[num_layers - num_shared :]) or {widths[0]}
    if len(own) > 1 or len(shared) > 1 or not shared <= {widths[0], 2 * widths[0]}:
        raise metadata.not_read(name)
    return widths[0], shared.pop()


def _each(metadata: GgufMetadata, name: str, num_layers: int) -> Sequence[int]:
    """A field of each layer. One that the file does not have for each is that of all."""
    value = metadata.needed(name)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers:
        raise metadata.not_read(name)
    return values


def _kinds(metadata: GgufMetadata, num_layers: int) -> list[str]:
    name = "attention.sliding_window_pattern"
    has_window = metadata.get(name)
    if isinstance(has_window, bool):
        has_window = [has_window] * num_layers
    # The last layer sees all keys, in transformers' config.
    if not isinstance(has_window, list) or len(has_window) != num_layers or has_window[-1]:
        raise metadata.not_read(name)
    return ["sliding_attention" if has else "full_attention" for has in has_window]


def _head_dim(metadata: GgufMetadata, ending: str) -> int:
    """The dimensions of heads: of layers without a window, or with one (`_swa`)."""
    names = [f"attention.{part}_length{ending}" for part in ("key", "value")]
    dims = {metadata.get(name) for name in names}
    if len(dims) > 1 or None in dims or metadata.peek(f"rope.dimension_count{ending}") not in {None, *dims}:
        raise metadata.not_read(*names, f"rope.dimension_count{ending}")
    metadata.get(f"rope.dimension_count{ending}")
    dim: int = dims.pop()
    return dim


def _ropes(metadata: GgufMetadata) -> dict[str, dict[str, Any]]:
    """Layers with a window turn all pairs of dimensions, others those whose factor is 1."""
    full: dict[str, Any] = {"rope_type": "proportional", "rope_theta": float(metadata.needed("rope.freq_base"))}
    factors = metadata.factors(_ROPE_FACTORS)
    if factors is not None:
        num_turned = sum(factor == 1.0 for factor in factors)
        if (
            not all(factor == 1.0 for factor in factors[:num_turned])
            or min(factors[num_turned:], default=_STAYS) < _STAYS
        ):
            raise metadata.refusal(f"its tensor {_ROPE_FACTORS} has other numbers than for pairs that turn or stay")
        # transformers rounds the product of the share and the number of pairs down.
        full["partial_rotary_factor"] = min(1.0, (num_turned + 0.25) / len(factors))
    sliding = {"rope_type": "default", "rope_theta": float(metadata.needed("rope.freq_base_swa"))}
    return {"full_attention": full, "sliding_attention": sliding}


ARCHITECTURE = GgufArchitecture(
    _read_config,
    names={
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    },
)
