"""Reads a GGUF file's metadata into one of transformers' configs, and names what of it is not read.

transformers' own reader skips fields that it does not know, and takes the default of the config's class instead.
"""

import re
from typing import Any

from worker_svc.gguf_gemma4 import read_gemma4
from worker_svc.gguf_metadata import GgufMetadata
from worker_svc.gguf_rope import read_rope

# What transformers' configs call a field of the metadata: the first of these names that a config has.
_NAMES = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "vocab_size": ("vocab_size",),
}
# Layers of models of 27 billion parameters, whose queries are scaled by another size: llama.cpp knows them by these.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_ATTENTION_BIAS = re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias")
_MLP_BIAS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias")


def read_config(metadata: GgufMetadata) -> Any:
    """transformers' config of a file's model. Raises PreparationFailed, naming them, for fields that are not read."""
    from transformers import AutoConfig, PreTrainedConfig

    if metadata.architecture == "gemma4":
        config = read_gemma4(metadata)
        metadata.check_fields_read()
        return config
    gguf = metadata.gguf
    found, _ = PreTrainedConfig.get_config_dict(gguf.parent, gguf_file=gguf.name)
    if metadata.architecture == "llama":
        # transformers takes a model of the name "mistral" to have the window of its Mistral config.
        found["model_type"] = "llama"
    for name in _NAMES:
        if isinstance(metadata.peek(name), list):
            raise metadata.not_read(name)
    single = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
    config = AutoConfig.for_model(**single)
    for name, names in _NAMES.items():
        known = next((each for each in names if hasattr(config, each)), None)
        if known is not None and (value := metadata.get(name)) is not None:
            # A cap of 0 is none.
            setattr(config, known, (value or None) if name.endswith("_softcapping") else value)
    if hasattr(config, "num_key_value_heads") and metadata.get("attention.head_count_kv") is None:
        config.num_key_value_heads = config.num_attention_heads
    _read_attention(metadata, config)
    metadata.check_fields_read()
    return config


def _read_attention(metadata: GgufMetadata, config: Any) -> None:
    """What all layers' attention has: sizes, positions, windows, scale and biases."""
    head_dim = metadata.peek("attention.key_length") or config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim") or head_dim == config.hidden_size // config.num_attention_heads:
        metadata.get("attention.key_length")
        if hasattr(config, "head_dim"):
            config.head_dim = head_dim
    if metadata.peek("attention.value_length") == head_dim:
        metadata.get("attention.value_length")
    if getattr(config, "rope_parameters", None):
        read_rope(metadata, config, head_dim)
    _read_windows(metadata, config)
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = config.num_hidden_layers == _LAYERS_OF_27B.get(metadata.architecture)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else head_dim
    if hasattr(config, "attention_bias"):
        config.attention_bias = metadata.has_tensor(_ATTENTION_BIAS)
    if hasattr(config, "mlp_bias"):
        config.mlp_bias = metadata.has_tensor(_MLP_BIAS)


def _read_windows(metadata: GgufMetadata, config: Any) -> None:
    window, has_window = (metadata.get(f"attention.sliding_window{part}") for part in ("", "_pattern"))
    kinds = getattr(config, "layer_types", None)
    if hasattr(config, "use_sliding_window") or not hasattr(config, "sliding_window"):
        if window and window < config.max_position_embeddings:
            raise metadata.not_read("attention.sliding_window")
        return
    if window is not None or metadata.architecture != "gemma2":  # Gemma 2 has one of 4,096 keys if it is not named
        config.sliding_window = window or None
    if kinds is None:
        return
    if config.sliding_window is None:
        kinds = ["full_attention"] * len(kinds)
    elif has_window is not None:
        # All layers but each so manieth have a window, or those that are true.
        if isinstance(has_window, bool):
            has_window = [has_window] * len(kinds)
        elif isinstance(has_window, int):
            has_window = [bool((layer + 1) % has_window) for layer in range(len(kinds))]
        if not isinstance(has_window, list) or len(has_window) != len(kinds):
            raise metadata.not_read("attention.sliding_window_pattern")
        kinds = ["sliding_attention" if has else "full_attention" for has in has_window]
    config.layer_types = kinds
