"""Writes a tiny Gemma 4 of transformers as a GGUF file, as llama.cpp's converter does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from tiny_gguf import write_file, write_tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_WHOLE_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def name_in_gguf(name: str) -> str:
    """What llama.cpp calls a tensor of transformers."""
    match = _LAYER.fullmatch(name)
    prefix, rest = ("", name) if match is None else (f"blk.{match[1]}.", match[2])
    if rest in _WHOLE_NAMES:
        return f"{prefix}{_WHOLE_NAMES[rest]}"
    return f"{prefix}{_NAMES[rest.removesuffix('.weight')]}.weight"


def write_gemma4_gguf(
    path: Path,
    model: Any,
    stored: Callable[[str], str] = lambda _: "F32",
    change: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """`stored` is the type of a matrix by its name in the file. `change` replaces fields."""
    config, writer = model.config, GGUFWriter(path, "gemma4")
    _write_fields(writer, config)
    write_tiny_tokenizer(writer)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        in_file = name_in_gguf(name)
        kind = stored(in_file) if tensor.dim() > 1 else "F32"
        _add(writer, in_file, tensor, GGMLQuantizationType[kind])
    rope = config.rope_parameters["full_attention"]
    dim = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    num_turned = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
    factors = [1.0] * num_turned + [1e30] * (dim // 2 - num_turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    change(writer)
    return write_file(writer, path)


def _write_fields(writer: GGUFWriter, config: Any) -> None:
    layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
    kinds, first_shared = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    dims = {kind: layer.head_dim for kind, layer in zip(kinds, layers, strict=True)}
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    wide = config.intermediate_size * (2 if config.use_double_wide_mlp else 1)
    widths = [config.intermediate_size if n < first_shared else wide for n in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else widths[0])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for kind, ending in (("full_attention", ""), ("sliding_attention", "_swa")):
        dim = dims[kind]
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"gemma4.{name}{ending}", dim)
        writer.add_float32(f"gemma4.rope.freq_base{ending}", config.rope_parameters[kind]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    numbers = tensor.to(torch.float32).numpy()
    flat = gguf.quantize(numbers.reshape(-1, numbers.shape[-1]), kind)
    writer.add_tensor(name, flat.reshape(*numbers.shape[:-1], -1), raw_dtype=kind)
