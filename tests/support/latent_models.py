"""Tiny configs of models with latent attention, in which each feature of theirs changes tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, YoutuConfig

from transformers_models import COMMON, save_with_choice_biases
from worker_svc.model.architecture import describe
from worker_svc.model.config import read_config
from worker_svc.model.description import ModelDescription

_SIZES: dict[str, Any] = {
    **COMMON, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
_V2: dict[str, Any] = {**_SIZES, "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8,
    "beta_slow": 1, "mscale": 0.5, "mscale_all_dim": 2.0,
}  # fmt: skip
_V3: dict[str, Any] = {
    **_SIZES, **_GROUPS, "q_lora_rank": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "num_nextn_predict_layers": 0,
}  # fmt: skip

_OF_ATTENTION = {
    *COMMON, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "rope_parameters",
}  # fmt: skip

VARIANTS: dict[str, Callable[[], Any]] = {
    "deepseek-v2-lite": lambda: DeepseekV2Config(**_V2),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_V2 | _GROUPS | {"q_lora_rank": 16, "rope_parameters": _YARN},
        topk_method="group_limited_greedy", routed_scaling_factor=1.7, attention_bias=True,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(**_V3 | {"rope_parameters": _YARN}),
    "deepseek-v3-plain": lambda: DeepseekV3Config(
        **_V3 | {"q_lora_rank": None}, norm_topk_prob=False, rope_interleave=False
    ),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **{name: value for name, value in _V3.items() if name != "first_k_dense_replace"}, attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "youtu": lambda: YoutuConfig(
        **{name: value for name, value in _V3.items() if name in _OF_ATTENTION} | {"num_hidden_layers": 2}
    ),
}  # fmt: skip


def with_rank(rank: int) -> Any:
    """A model with latent vectors of other dimensions."""
    return DeepseekV2Config(**_V2 | {"kv_lora_rank": rank})


def with_real_heads(num_heads: int) -> Any:
    """A model whose heads have the dimensions of DeepSeek's own."""
    sizes = {
        "num_attention_heads": num_heads, "num_key_value_heads": num_heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 2, "hidden_size": 8 * num_heads,
    }  # fmt: skip
    return DeepseekV2Config(**_V2 | sizes | {"initializer_range": 0.1})


NOT_DESCRIBED: dict[str, Callable[[], Any]] = {
    "deepseek-v2-normalised": lambda: DeepseekV2Config(**_V2, norm_topk_prob=True),
    "deepseek-v2-other-choice": lambda: DeepseekV2Config(**_V2, topk_method="noaux_tc"),
    "deepseek-v2-biased-experts": lambda: DeepseekV2Config(**_V2, mlp_bias=True),
    "deepseek-v2-without-a-shared-expert": lambda: DeepseekV2Config(**_V2 | {"n_shared_experts": 0}),
    "deepseek-v2-dynamic": lambda: DeepseekV2Config(
        **_V2 | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0}}
    ),
}  # fmt: skip
"""Configs of the same architectures that a description cannot express."""


def save(save_model: Callable[..., Path], name: str) -> Path:
    """Saves a variant, of which the biases of the choice are no zeros as in a new model."""
    return save_with_choice_biases(save_model, VARIANTS[name]())


def describe_saved(directory: Path) -> ModelDescription:
    described = describe(read_config(directory))
    assert described is not None
    return described
