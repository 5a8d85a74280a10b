"""Writes tiny models of transformers as GGUF files, as llama.cpp's converter does, of each architecture that is read.

Source: llama.cpp's `conversion/`. Nothing of the code that reads files is used here.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

import dense_models
import latent_models
import llama_models
import transformers_models
from tiny_gguf import TOKENS, add_field, write_file, write_tiny_tokenizer

Fields: TypeAlias = dict[str, Any]
Named: TypeAlias = tuple[str, Tensor]

_VARIANTS = {
    **llama_models.VARIANTS, **transformers_models.VARIANTS, **dense_models.VARIANTS, **latent_models.VARIANTS,
}  # fmt: skip
# Sizes of whole blocks
_SIZES: Fields = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd",
    "transformer.wte": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "transformer.wpe": "position_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "transformer.ln_f": "output_norm",
    "gpt_neox.final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_2": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc2": "ffn_down",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_SHARED = re.compile(r"mlp\.shared_(?:experts?|mlp)\.(gate|up|down)_proj")
_EXPERTS = re.compile(r".*\.experts\.(gate_up|down)_proj(_bias)?")
_LAYER = re.compile(r"\w+\.(?:layers|h)\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class GgufCase:
    """A model, and how it is written."""

    architecture: str
    config: Callable[[], Any]
    fields: Callable[[Any], Fields] = lambda _: {}
    """Those beside the common ones, which they replace; None: the file does not have it."""
    names: Mapping[str, str] = field(default_factory=dict)
    tensors: Callable[[Any, str, Tensor], Iterator[Named]] | None = None
    """What is written of a tensor: its names in the layer as transformers has them, and the tensors."""
    is_mixture: bool = False

    def stored(self, kind: str) -> Callable[[str], str]:
        """The types of matrices if products are in blocks of one type, by their names in the file."""
        return lambda name: "F32" if re.search(r"gate_inp|position_embd", name) else kind


def _variant(name: str, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = _VARIANTS[name]()
        return type(config)(**(copy.deepcopy(config.to_dict()) | _SIZES | fields))

    return make


def _neighbours(config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    """Queries and keys with the halves of rotated pairs beside each other."""
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    if (count := heads.get(name.rpartition(".")[0])) is not None:
        tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def _granite4(config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    """A dense model of Granite 4, whose MLP is that for all tokens of models with experts."""
    if name.endswith("shared_mlp.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"mlp.{part}_proj.weight", half.contiguous()
    else:
        yield from _neighbours(config, name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor)


def _above_one(_config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _latent(config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    dims = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = torch.split(tensor.view(config.num_attention_heads, sum(dims), -1), dims, 1)
    yield "attn_k_b", keys.transpose(1, 2).contiguous()
    yield "attn_v_b", values.contiguous()


def _in_turn(_config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    """gpt-oss, whose experts are [experts, inputs, outputs] with gate and up in turn."""
    if (experts := _EXPERTS.fullmatch(name)) is None:
        yield ("attn_sinks" if name.endswith("sinks") else name), tensor
        return
    ending = ".bias" if experts[2] else ".weight"
    tensor = tensor if experts[2] else tensor.transpose(1, 2)
    if experts[1] == "down":
        yield f"ffn_down_exps{ending}", tensor.contiguous()
    else:
        for part, place in (("gate", 0), ("up", 1)):
            yield f"ffn_{part}_exps{ending}", tensor[:, place::2].contiguous()


def _gpt_neox(config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    """All queries, then all keys and all values: transformers has those of each head together."""
    if ".query_key_value." in name:
        heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        tensor = heads.transpose(0, 1).reshape(tensor.shape).contiguous()
    yield name, tensor


def _gpt2(_config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    is_transposed = re.search(r"\.c_(attn|proj|fc)\.weight$", name) is not None
    yield name, tensor.t().contiguous() if is_transposed else tensor


def _latent_fields(config: Any) -> Fields:
    queries = config.qk_nope_head_dim + config.qk_rope_head_dim
    rope = config.rope_parameters
    return {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": queries,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"] * 0.1 if "mscale_all_dim" in rope else None,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 0),
        "expert_count": getattr(config, "n_routed_experts", None),
        "expert_shared_count": getattr(config, "n_shared_experts", 0),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "expert_weights_scale": getattr(config, "routed_scaling_factor", None),
        "expert_weights_norm": getattr(config, "norm_topk_prob", None) or None,
        "vocab_size": config.vocab_size,
    }


def _whole_latent_fields(config: Any) -> Fields:
    """Of the first files, with the product for keys and values in one tensor."""
    fields = _latent_fields(config)
    queries, values = fields.pop("attention.key_length_mla"), fields.pop("attention.value_length_mla")
    return fields | {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": queries,
        "attention.value_length": values,
    }


def _with_scores(fields: Callable[[Any], Fields], gating: int) -> Callable[[Any], Fields]:
    return lambda config: fields(config) | {"expert_gating_func": gating}


def _rotated(config: Any) -> Fields:
    """The number of dimensions that are rotated."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0))}


def _granite(config: Any) -> Fields:
    return _rotated(config) | {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "vocab_size": config.vocab_size,
    }


def _experts(config: Any) -> Fields:
    """Those of DeepSeek-V3's router."""
    return {
        "expert_count": getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", None),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": getattr(config, "n_shared_experts", None) or getattr(config, "num_shared_experts", None),
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 0),
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
    }


def _windows(config: Any) -> Fields:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
    }


_MROPE = {"rope.dimension_sections": [4, 2, 2, 0]}
_YARN: Fields = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
    "beta_slow": 1.0,
}  # fmt: skip
_LATENT: Fields = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24,
    "head_dim": 16, "qk_head_dim": 48, "num_key_value_heads": 4,
}  # fmt: skip
_OF_TWO: Fields = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}

CASES: dict[str, GgufCase] = {
    "gpt-oss": GgufCase(
        "gpt-oss", _variant("gpt-oss"),
        lambda config: {
            "attention.sliding_window": config.sliding_window, "expert_count": config.num_local_experts,
            "expert_feed_forward_length": config.intermediate_size,
        },
        {"post_attention_layernorm": "post_attention_norm"}, _in_turn, is_mixture=True,
    ),
    "deepseek-v2-lite": GgufCase(
        "deepseek2", _variant("deepseek-v2-lite", **_LATENT | {"q_lora_rank": None}), _latent_fields, tensors=_latent,
        is_mixture=True,
    ),
    "deepseek-v2": GgufCase(
        "deepseek2", _variant("deepseek-v2", **_LATENT, attention_bias=False,
        rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}),
        _with_scores(_latent_fields, 1), tensors=_latent, is_mixture=True,
    ),
    "deepseek-v3": GgufCase(
        "deepseek2", _variant("deepseek-v3", **_LATENT,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        _with_scores(_latent_fields, 2), tensors=_latent, is_mixture=True,
    ),
    "deepseek-v3-first-files": GgufCase(
        "deepseek2", _variant("deepseek-v3", **_LATENT, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
        _with_scores(_whole_latent_fields, 2), is_mixture=True,
    ),
    "glm4-moe-lite": GgufCase(
        "deepseek2", _variant(
            "glm4-moe-lite", **_LATENT, attention_bias=False, mlp_layer_types=["dense", "sparse", "sparse"]
        ),
        lambda config: _latent_fields(config) | {"leading_dense_block_count": 1, "expert_gating_func": 2},
        tensors=_latent, is_mixture=True,
    ),
    "youtu": GgufCase(
        "deepseek2", _variant("youtu", **_LATENT),
        lambda config: _latent_fields(config) | {"leading_dense_block_count": config.num_hidden_layers},
        tensors=_latent,
    ),
    "glm": GgufCase("chatglm", _variant("glm", rms_norm_eps=1e-5), _rotated),
    "glm-unbiased": GgufCase("chatglm", _variant("glm", attention_bias=False, tie_word_embeddings=True), _rotated),
    "glm4": GgufCase("glm4", _variant("glm4"), _rotated),
    "glm4-moe": GgufCase(
        "glm4moe", _variant("glm4-moe"), lambda config: _rotated(config) | _experts(config),
        {"post_attention_layernorm": "post_attention_norm"}, is_mixture=True,
    ),
    "glm4-moe-biased": GgufCase(
        "glm4moe", _variant("glm4-moe-biased"), lambda config: _rotated(config) | _experts(config) | _MROPE,
        {"post_attention_layernorm": "post_attention_norm"}, is_mixture=True,
    ),
    "granite": GgufCase("granite", _variant("granite", rms_norm_eps=1e-5), _granite, tensors=_neighbours),
    "granite-biased": GgufCase("granite", _variant("granite-biased"), _granite, tensors=_neighbours),
    "granite4-micro": GgufCase(
        "granite", _variant("granite4-micro", mamba_d_head=32, rms_norm_eps=1e-5, shared_intermediate_size=160),
        lambda config: _granite(config) | {
            "expert_shared_feed_forward_length": config.shared_intermediate_size, "expert_count": 0,
            "expert_used_count": 0, "ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1,
            "ssm.inner_size": 128, "ssm.time_step_rank": 4, "rope.scaling.finetuned": True,
        },
        tensors=_granite4,
    ),
    "granite-moe": GgufCase(
        "granitemoe", _variant("granite-moe"),
        lambda config: _granite(config) | {"expert_count": config.num_local_experts}, tensors=_neighbours,
        is_mixture=True,
    ),
    "command-r": GgufCase(
        "command-r", _variant("cohere", tie_word_embeddings=True),
        lambda config: {"logit_scale": config.logit_scale, "rope.scaling.type": "none"},
    ),
    "cohere2": GgufCase(
        "cohere2", _variant("cohere2", tie_word_embeddings=True, num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"]),
        lambda config: {
            "logit_scale": config.logit_scale, "rope.scaling.type": "none", "vocab_size": config.vocab_size,
            "attention.sliding_window": config.sliding_window,
            "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        },
    ),
    "ministral3": GgufCase(
        "mistral3", _variant("ministral3", sliding_window=None),
        lambda config: _rotated(config) | {
            "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
            "vocab_size": config.vocab_size,
        },
        tensors=_neighbours,
    ),
    "mistral-small": GgufCase(
        "mistral3", _variant("mistral", sliding_window=None, head_dim=16), _rotated, tensors=_neighbours,
    ),
    "mixtral": GgufCase(
        "llama", _variant("mixtral", head_dim=16, sliding_window=None),
        lambda config: _rotated(config) | {"expert_count": config.num_local_experts, "vocab_size": config.vocab_size},
        tensors=_neighbours, is_mixture=True,
    ),
    "smollm3": GgufCase(
        "smollm3", _variant("smollm3", num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1], use_sliding_window=False,
        sliding_window=None, layer_types=["full_attention"] * 5), _rotated, tensors=_neighbours,
    ),
    "gemma": GgufCase("gemma", _variant("gemma", tie_word_embeddings=True), tensors=_above_one),
    "olmo2": GgufCase("olmo2", _variant("olmo2"), names={"post_attention_layernorm": "post_attention_norm"}),
    "olmo3": GgufCase(
        "olmo2", _variant("olmo3", rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": _YARN,
        }), _windows, {"post_attention_layernorm": "post_attention_norm"},
    ),
    "qwen2-vl": GgufCase("qwen2vl", _variant("qwen2"), lambda _: _MROPE),
    "qwen3-vl": GgufCase(
        "qwen3vl", _variant("qwen3", head_dim=16), lambda _: _MROPE | {"n_deepstack_layers": 3}
    ),
    "qwen3-vl-moe": GgufCase(
        "qwen3vlmoe", _variant("qwen3-moe", norm_topk_prob=True),
        lambda config: _MROPE | {"n_deepstack_layers": 3, "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size}, is_mixture=True,
    ),
    "qwen2-moe": GgufCase(
        "qwen2moe", _variant("qwen2-moe"),
        lambda config: {
            "expert_count": config.num_experts, "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }, is_mixture=True,
    ),
    "exaone4": GgufCase(
        "exaone4", _variant("exaone4"), _windows, {"post_attention_layernorm": "post_attention_norm"},
    ),
    "exaone4-positions-everywhere": GgufCase(
        "exaone4", _variant("exaone4-positions-everywhere"),
        names={"post_attention_layernorm": "post_attention_norm"},
    ),
    "k-exaone": GgufCase(
        "exaone-moe", _variant("k-exaone"),
        lambda config: _windows(config) | _experts(config) | {
            "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
            "rope.scaling.type": "none",
        }, is_mixture=True,
    ),
    "seed-oss": GgufCase("seed_oss", _variant("seed-oss"), names={"post_attention_layernorm": "post_attention_norm"}),
    "seed-oss-other-biases": GgufCase(
        "seed_oss", _variant("seed-oss-other-biases"), names={"post_attention_layernorm": "post_attention_norm"}
    ),
    "ernie4-5": GgufCase("ernie4_5", _variant("ernie4-5")),
    "ernie4-5-moe": GgufCase(
        "ernie4_5-moe", _variant("ernie4-5-moe", num_hidden_layers=3),
        lambda config: {
            "expert_count": config.moe_num_experts, "expert_used_count": config.moe_k,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        }, is_mixture=True,
    ),
    "hunyuan": GgufCase(
        "hunyuan-dense", _variant("hunyuan"),
        lambda config: {
            "rope.freq_base": 20.0 * 5.0 ** (16 / 14), "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": config.max_position_embeddings,
        },
    ),
    "hunyuan-moe": GgufCase(
        "hunyuan-moe", _variant("hunyuan-moe"),
        lambda config: {
            "rope.freq_base": 50.0 * 10.0 ** (16 / 14), "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": config.max_position_embeddings,
            "expert_count": config.num_experts, "expert_used_count": 2, "expert_shared_count": 1,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
        }, is_mixture=True,
    ),
    "starcoder2": GgufCase("starcoder2", _variant("starcoder2", sliding_window=None)),
    "starcoder2-unbiased": GgufCase("starcoder2", _variant("starcoder2", sliding_window=None, use_bias=False)),
    "stablelm": GgufCase(
        "stablelm", _variant("stablelm", **_OF_TWO), lambda config: _rotated(config) | {"use_parallel_residual": False}
    ),
    "stablelm-side-by-side": GgufCase(
        "stablelm", _variant("stablelm-side-by-side", **_OF_TWO),
        lambda config: _rotated(config) | {"use_parallel_residual": True},
    ),
    "nemotron": GgufCase(
        "nemotron", _variant("nemotron"), lambda config: _rotated(config) | {"rope.scaling.type": "none"},
        tensors=_above_one,
    ),
    "minimax-m2": GgufCase(
        "minimax-m2", _variant("minimax-m2"),
        lambda config: _rotated(config) | {
            "expert_count": config.num_local_experts, "expert_feed_forward_length": config.intermediate_size,
            "expert_gating_func": 2,
        }, is_mixture=True,
    ),
    "dots1": GgufCase(
        "dots1", _variant("dots1", sliding_window=None, layer_types=["full_attention"] * 3), _experts, is_mixture=True
    ),
    "phi2": GgufCase("phi2", _variant("phi", **_OF_TWO, intermediate_size=256), _rotated),
    "arcee": GgufCase("arcee", _variant("arcee", head_dim=16), _rotated, tensors=_neighbours),
    "arcee-biased": GgufCase("arcee", _variant("arcee-biased", head_dim=16), _rotated, tensors=_neighbours),
    "olmoe": GgufCase(
        "olmoe", _variant("olmoe", rms_norm_eps=1e-5), lambda config: {"expert_count": config.num_experts},
        is_mixture=True,
    ),
    "gpt2": GgufCase(
        "gpt2", _variant("gpt2-tied-narrow", n_embd=64, n_head=4, n_inner=256, activation_function="gelu_new",
        tie_word_embeddings=True),
        lambda config: {"attention.head_count_kv": None, "feed_forward_length": config.n_inner}, tensors=_gpt2,
    ),
    "gpt-neox": GgufCase(
        "gptneox", _variant("gpt-neox", hidden_act="gelu", num_attention_heads=2),
        lambda config: _rotated(config) | {"attention.head_count_kv": None, "use_parallel_residual": True},
        tensors=_gpt_neox,
    ),
    "gpt-neox-in-turn": GgufCase(
        "gptneox", _variant("gpt-neox-in-turn-unbiased", attention_bias=True),
        lambda config: _rotated(config) | {"attention.head_count_kv": None, "use_parallel_residual": False},
        tensors=_gpt_neox,
    ),
    "jais2": GgufCase("jais2", _variant("jais2", head_dim=16), _rotated),
}  # fmt: skip


def write_model_gguf(
    path: Path,
    case: GgufCase,
    model: Any,
    stored: Callable[[str], str] = lambda _: "F32",
    change: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """`stored` is the type of a matrix by its name in the file. `change` adds or replaces fields and tensors."""
    config, writer = model.config, GGUFWriter(path, case.architecture)
    for name, value in (_common(config) | case.fields(config)).items():
        if value is not None:
            add_field(writer, f"{case.architecture}.{name}", value)
    write_tiny_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for in_file, part in _written(case, config, name, tensor):
            kind = stored(in_file) if part.dim() > 1 and in_file.endswith(".weight") else "F32"
            _add_tensor(writer, in_file, part, GGMLQuantizationType[kind])
    change(writer)
    return write_file(writer, path)


def _common(config: Any) -> Fields:
    """The fields that the converter writes for all decoders."""
    given = config.to_dict()
    fields: Fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": given.get("intermediate_size") or given.get("n_inner"),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": given.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": given.get("rms_norm_eps", given.get("norm_eps")),
        "attention.layer_norm_epsilon": next((given[name] for name in _EPSILONS if name in given), None),
        "attention.key_length": given.get("head_dim"),
        "attention.value_length": given.get("head_dim"),
        "expert_used_count": given.get("num_experts_per_tok"),
        "expert_group_count": given.get("n_group"),
        "expert_group_used_count": given.get("topk_group"),
    }
    rope = given.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    fields["rope.freq_base"] = rope.get("rope_theta")
    if rope.get("rope_type") == "yarn":
        fields |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return fields


def _written(case: GgufCase, config: Any, name: str, tensor: Tensor) -> Iterator[Named]:
    match = _LAYER.fullmatch(name)
    prefix, rest = ("", name) if match is None else (f"blk.{match[1]}.", match[2])
    changed = [(rest, tensor)] if case.tensors is None else case.tensors(config, rest, tensor)
    for inner, part in changed:
        for in_file, data in _in_layer(case, inner, part):
            yield f"{prefix}{in_file}", data


def _in_layer(case: GgufCase, name: str, tensor: Tensor) -> Iterator[Named]:
    """The names in the file, behind that of the layer."""
    if name.endswith("e_score_correction_bias"):
        yield "exp_probs_b.bias", tensor.flatten()
    elif (experts := _EXPERTS.fullmatch(name)) is not None and experts[1] == "down":
        yield "ffn_down_exps.weight", tensor
    elif experts is not None:
        for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield f"ffn_{part}_exps.weight", half.contiguous()
    elif name.startswith(("attn_", "ffn_")):
        yield name if name.endswith((".weight", ".bias")) else f"{name}.weight", tensor
    else:
        layer, _, kind = name.rpartition(".")
        shared = _SHARED.fullmatch(layer)
        names = {**_NAMES, **case.names}
        yield f"{names[layer] if shared is None else f'ffn_{shared[1]}_shexp'}.{kind}", tensor


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    numbers = tensor.to(torch.float32).numpy()
    if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F32  # as llama.cpp's tool leaves it
    flat = gguf.quantize(numbers.reshape(-1, numbers.shape[-1]), kind)
    writer.add_tensor(name, flat.reshape(*numbers.shape[:-1], -1), raw_dtype=kind)
