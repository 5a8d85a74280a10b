"""Tiny configs of many architectures, with the special features of each enabled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 97
WINDOW = 20
CONTEXT = 128
# Wide random weights that are not tied, for varied output without ties; tied weights would repeat a token.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIGMOID_EXPERTS: dict[str, Any] = {
    **_SIZES, "head_dim": 16, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 2.0,
    "short_factor": [1.5] * 8,
    "long_factor": [4.0] * 8,
}

VARIANTS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(**COMMON, n_embd=48, n_layer=2, n_head=3, scale_attn_by_inverse_layer_idx=True),
    "opt": lambda: OPTConfig(
        **COMMON, hidden_size=48, word_embed_proj_dim=48, ffn_dim=80, num_hidden_layers=2, num_attention_heads=3,
        init_std=0.3,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        **COMMON, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2,
    ),
    "phi": lambda: PhiConfig(**_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}, qk_layernorm=True),
    "phi3": lambda: Phi3Config(**_SIZES | {"hidden_size": 96}, sliding_window=WINDOW),
    "phi3-longrope": lambda: Phi3Config(
        **_SIZES | {"hidden_size": 96}, rope_parameters=_LONGROPE, original_max_position_embeddings=96,
    ),
    "gemma": lambda: GemmaConfig(**_SIZES | {"num_key_value_heads": 1}, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, head_dim=16, query_pre_attn_scalar=12, sliding_window=WINDOW, attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3}, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, head_dim=16, num_local_experts=4, sliding_window=WINDOW),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}, **_EXPERTS, shared_expert_intermediate_size=32,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES | {"head_dim": 16}, **_EXPERTS),
    "qwen3-moe-mixed": lambda: Qwen3MoeConfig(
        **_SIZES | {"head_dim": 16}, **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0],
    ),
    "olmoe": lambda: OlmoeConfig(
        **_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1}, num_experts=4, num_experts_per_tok=2,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(**_SIGMOID_EXPERTS, use_qk_norm=True),
    "glm4-moe-biased": lambda: Glm4MoeConfig(
        **_SIGMOID_EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}, attention_bias=True,
        norm_topk_prob=False,
    ),
    "dots1": lambda: Dots1Config(
        **_SIGMOID_EXPERTS, norm_topk_prob=True, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 32}, head_dim=32,
        num_local_experts=8, num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    ),
    "granite-moe": lambda: GraniteMoeConfig(
        **_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 32}, num_local_experts=4,
        num_experts_per_tok=2, embedding_multiplier=6.0, attention_multiplier=0.1, residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "k-exaone": lambda: ExaoneMoeConfig(
        **_SIZES | {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1}, num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=32, n_group=4, topk_group=2, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "hunyuan-moe": lambda: HunYuanMoEV1Config(
        **_SIZES | {"intermediate_size": 32}, head_dim=16, num_experts=4, moe_topk=[2, 2],
        rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 1.0, "alpha": 10.0},
    ),
    "ernie4-5-moe": lambda: Ernie4_5_MoeConfig(
        **_SIZES | {"num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1}, moe_num_experts=8,
        moe_k=3, moe_intermediate_size=32, moe_layer_start_index=1, moe_layer_end_index=2,
    ),
    "ernie4-5-moe-alone": lambda: Ernie4_5_MoeConfig(
        **_SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}, moe_num_experts=8, moe_k=3,
        moe_intermediate_size=32, moe_layer_interval=2, moe_num_shared_experts=0,
    ),
}  # fmt: skip


def save_with_choice_biases(save_model: Callable[..., Path], config: Any) -> Path:
    """Saves a random model, of which the biases of the choice of experts are no zeros as in a new model."""
    directory = save_model(config)
    path = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith("e_score_correction_bias"):
            tensors[tensor_name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory
