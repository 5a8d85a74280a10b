"""Reads a GGUF file's metadata into one of transformers' configs.

transformers' own reader skips fields that it does not know, and takes the default of the config's class instead.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.rope import RopeForm, read_rope

# What transformers' configs call a field of the metadata: the first of these names that a config has.
_NAMES = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "logit_scale": ("logit_scale",),
}
SOFTMAX, SIGMOID = (1,), (2,)
"""Values of `expert_gating_func`: how routers make weights of their outputs."""
# What 0 means in fields that are not applied then.
_NOT_APPLIED = {"attn_logit_softcapping": None, "expert_weights_scale": 1.0, "final_logit_softcapping": None}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_HEAD = re.compile(r"output\.weight")


def has_bias(*names: str) -> re.Pattern[str]:
    """What the biases of a layer's products with these names match."""
    return re.compile(rf"blk\.\d+\.({'|'.join(names)})\.bias")


# Whether a config has biases, by what it calls that: it has them if the file has one of them.
_BIASES = {
    "attention_bias": has_bias("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
    "mlp_bias": has_bias("ffn_gate", "ffn_up", "ffn_down"),
}


@dataclass(frozen=True, slots=True)
class ConfigForm:
    """How the metadata of an architecture becomes a config, beside what is the same for all decoders."""

    model_type: str
    """transformers'."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the config calls fields, where it is not what `_NAMES` has. These win over other fields."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of the config that are those of every model unless a field of the file says otherwise."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values that fields may have; None: a file need not have the field."""
    unused: tuple[str, ...] = ()
    """Fields that change nothing, whatever they are."""
    biases: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """What the config calls it that there are biases, where it is not what `_BIASES` has, and their tensors."""
    more: Callable[[GgufMetadata], Mapping[str, Any]] | None = None
    """Returns further values of the config, which win."""
    rope: RopeForm = field(default_factory=RopeForm)
    window: int | None = None
    """Of layers that have one, where a file does not say it."""
    layers_of_27b: int | None = None
    """How many layers the model has whose queries are scaled by the width of a head, with `query_pre_attn_scalar`."""


def decoder(form: ConfigForm) -> Callable[[GgufMetadata], Any]:
    """`read_decoder` for an architecture whose files all have one form."""
    return partial(read_decoder, form=form)


def read_decoder(metadata: GgufMetadata, form: ConfigForm) -> Any:
    """The config. Raises PreparationFailed for fields that are missing, or have values that it cannot hold."""
    from transformers import AutoConfig

    metadata.check_sizes()
    known = AutoConfig.for_model(form.model_type)
    fields = dict(form.fixed) | _sizes(metadata, form, known)
    head_dim = metadata.peek("attention.key_length")
    if head_dim or hasattr(known, "head_dim"):  # some classes use it without a default
        fields["head_dim"] = head_dim or _width(fields)
    if hasattr(known, "num_key_value_heads"):
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    for name, pattern in {**_BIASES, **form.biases}.items():
        if hasattr(known, name):
            fields[name] = metadata.has_tensor(pattern)
    for name, values in form.required.items():
        if None not in values:
            metadata.needed(name)
        if metadata.get(name) not in values:
            raise metadata.not_read(name)
    for name in form.unused:
        metadata.get(name)
    if form.more is not None:
        fields |= form.more(metadata)
    fields |= _windows(metadata, form, known, fields)
    config = AutoConfig.for_model(form.model_type, **fields)
    _read_heads(metadata, form, config)
    return config


def _sizes(metadata: GgufMetadata, form: ConfigForm, known: Any) -> dict[str, Any]:
    """What files of all architectures say in the same way."""
    fields: dict[str, Any] = {
        "vocab_size": metadata.num_rows("token_embd.weight"),
        "num_hidden_layers": metadata.num_layers,
        "tie_word_embeddings": not metadata.has_tensor(_HEAD),
        **{name: metadata.general(f"tokenizer.ggml.{field}_token_id") for name, field in _TOKENS.items()},
    }
    metadata.get("vocab_size")  # that of the rows
    if hasattr(known, "num_nextn_predict_layers"):
        fields["num_nextn_predict_layers"] = metadata.num_predicting
    others = {name: given for name, given in _NAMES.items() if name not in form.names}
    names = {name: next((each for each in given if hasattr(known, each)), None) for name, given in others.items()}
    for name, of_config in (*names.items(), *form.names.items()):
        if isinstance(metadata.peek(name), list):
            raise metadata.not_read(name)
        if of_config is not None and (value := metadata.get(name)) is not None:
            fields[of_config] = value or _NOT_APPLIED.get(name, value)
    return fields


def _width(fields: Mapping[str, Any]) -> int:
    """The dimensions of a head if nothing else is said."""
    width: int = fields["hidden_size"] // fields["num_attention_heads"]
    return width


def _read_heads(metadata: GgufMetadata, form: ConfigForm, config: Any) -> None:
    """The sizes of heads, their positions and their scale."""
    width = config.hidden_size // config.num_attention_heads
    head_dim = metadata.peek("attention.key_length") or width
    if hasattr(config, "head_dim") or head_dim == width:
        metadata.get("attention.key_length")
    if metadata.peek("attention.value_length") == head_dim:
        metadata.get("attention.value_length")
    if getattr(config, "rope_parameters", None):
        read_rope(metadata, config, head_dim, form.rope)
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = width if config.num_hidden_layers == form.layers_of_27b else head_dim


def _windows(metadata: GgufMetadata, form: ConfigForm, known: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window of keys, and how many keys it has."""
    window, has_window = (metadata.get(f"attention.sliding_window{part}") for part in ("", "_pattern"))
    if hasattr(known, "use_sliding_window") or not hasattr(known, "sliding_window"):
        if window and window < fields["max_position_embeddings"]:
            raise metadata.not_read("attention.sliding_window")
        return {}
    window = (form.window if window is None else window) or None
    num_layers: int = fields["num_hidden_layers"]
    if getattr(known, "layer_types", None) is None:
        return {"sliding_window": window}
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if has_window is None:  # the config's class says which
        return {"sliding_window": window}
    return {"sliding_window": window, "layer_types": window_kinds(metadata, has_window, num_layers)}


def window_kinds(
    metadata: GgufMetadata, has_window: object, num_layers: int, *, begins_without: bool = False
) -> list[str]:
    """transformers' names of the kinds of layers, given `attention.sliding_window_pattern`: those that are true have a
    window, or all layers but each so manieth, of which the first layer is one if `begins_without`. 0: all have one.
    Raises PreparationFailed for another value.
    """
    if isinstance(has_window, bool):
        has_window = [has_window] * num_layers
    elif isinstance(has_window, int):
        first = 0 if begins_without else 1
        has_window = [not has_window or bool((layer + first) % has_window) for layer in range(num_layers)]
    if not isinstance(has_window, list) or len(has_window) not in (num_layers, metadata.num_blocks):
        raise metadata.not_read("attention.sliding_window_pattern")
    return ["sliding_attention" if has else "full_attention" for has in has_window[:num_layers]]
