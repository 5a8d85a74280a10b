"""Tiny configs of the dense architectures beside the Llama family, in which each feature of theirs changes tokens.

Windows are shorter than the prompts of tests, and caps below the scores and logits that random weights make.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HyperCLOVAXConfig,
    Jais2Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from transformers_models import COMMON, VOCAB

WINDOW = 7
ORIGINAL_CONTEXT = 96
_SIZES: dict[str, Any] = {
    **COMMON, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_BOTH_WAYS = {"is_causal": False}
_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
_GEMMA3_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}
# A head's frequencies, of which layers without a window turn a part
_GEMMA4_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "factor": 2.0},
}
_GEMMA4: dict[str, Any] = {
    **_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 48,
    "sliding_window": WINDOW, "rope_parameters": _GEMMA4_ROPES, "final_logit_softcapping": 5.0, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA4_SMALL: dict[str, Any] = {
    **_GEMMA4, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding", "full")],
    "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_OLMO3_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
    },
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 3.0,
}  # fmt: skip
_GRANITE4: dict[str, Any] = {
    "shared_intermediate_size": 80, "num_local_experts": 0, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 4,
}  # fmt: skip
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0], "long_factor": [4.0] * 6,
}  # fmt: skip
_MINISTRAL3: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
_GPT2: dict[str, Any] = {**COMMON, "n_embd": 48, "n_layer": 2, "n_head": 3}
_GPT_NEOX: dict[str, Any] = {
    **COMMON, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_OPT: dict[str, Any] = {
    **COMMON, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "init_std": 0.3,
}  # fmt: skip

VARIANTS: dict[str, Callable[[], Any]] = {
    "gemma": lambda: GemmaConfig(**_SIZES, head_dim=32),
    "gemma2": lambda: Gemma2Config(**_SIZES, **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma2-tied-biased": lambda: Gemma2Config(
        **_SIZES | _TIED, **_GEMMA, attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3}, **_GEMMA, rope_parameters=_GEMMA3_ROPES,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_GEMMA4 | {"num_global_key_value_heads": 1}, hidden_size_per_layer_input=0, attention_k_eq_v=True
    ),
    "gemma4-small": lambda: Gemma4TextConfig(**_GEMMA4_SMALL),
    "gemma4-experts": lambda: Gemma4TextConfig(
        **_GEMMA4, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "gemma4-unified-biased": lambda: Gemma4UnifiedTextConfig(**_GEMMA4 | _TIED, attention_bias=True),
    "smollm3": lambda: SmolLM3Config(
        **_SIZES, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES, attention_bias=True),
    "olmo3": lambda: Olmo3Config(
        **_SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_OLMO3_ROPES,
    ),
    "granite": lambda: GraniteConfig(**_SIZES, **_GRANITE, rms_norm_eps=3.0),
    "granite-biased": lambda: GraniteConfig(**_SIZES, **_GRANITE, attention_bias=True, mlp_bias=True),
    "granite4-micro": lambda: GraniteMoeHybridConfig(**_SIZES, **_GRANITE, **_GRANITE4, position_embedding_type="rope"),
    "granite4-without-positions": lambda: GraniteMoeHybridConfig(**_SIZES, **_GRANITE, **_GRANITE4),
    "seed-oss": lambda: SeedOssConfig(**_SIZES, head_dim=32, attention_bias=True),
    "seed-oss-other-biases": lambda: SeedOssConfig(
        **_SIZES, head_dim=32, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
    "arcee": lambda: ArceeConfig(**_SIZES),
    "arcee-biased": lambda: ArceeConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "ministral": lambda: MinistralConfig(
        **_SIZES, head_dim=32, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "ministral3": lambda: Ministral3Config(
        **_SIZES, head_dim=32, sliding_window=WINDOW, rope_parameters=dict(_MINISTRAL3)
    ),
    "exaone4": lambda: Exaone4Config(**_SIZES, sliding_window=WINDOW, sliding_window_pattern=2),
    "exaone4-positions-everywhere": lambda: Exaone4Config(
        **_SIZES, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "hunyuan": lambda: HunYuanDenseV1Config(
        **_SIZES, head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 20.0, "alpha": 5.0, "factor": 1.0},
    ),
    "helium": lambda: HeliumConfig(**_SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "cwm": lambda: CwmConfig(
        **_SIZES | {"bos_token_id": 0}, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "jais2": lambda: Jais2Config(**_SIZES),
    "hyperclovax": lambda: HyperCLOVAXConfig(**_SIZES, **_GRANITE | {"logits_scaling": 0.3}),
    "hyperclovax-biased": lambda: HyperCLOVAXConfig(
        **_SIZES, **_GRANITE | {"logits_scaling": 0.3}, use_post_norm=False, attention_bias=True, mlp_bias=True
    ),
    "phi3": lambda: Phi3Config(**_SIZES, sliding_window=WINDOW),
    "phi3-longrope": lambda: Phi3Config(
        **_SIZES, rope_parameters=_LONGROPE, original_max_position_embeddings=ORIGINAL_CONTEXT
    ),
    "cohere": lambda: CohereConfig(**_SIZES, logit_scale=0.25),
    "cohere-tied-biased": lambda: CohereConfig(**_SIZES | _TIED, attention_bias=True, hidden_act="gelu"),
    "cohere2": lambda: Cohere2Config(
        **_SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], logit_scale=0.5
    ),
    "glm": lambda: GlmConfig(**_SIZES, head_dim=32),
    "glm-tied-unbiased": lambda: GlmConfig(
        **_SIZES | _TIED, head_dim=48, attention_bias=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0, "partial_rotary_factor": 1.0},
    ),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=32),
    "ernie4-5": lambda: Ernie4_5Config(**_SIZES, head_dim=32),
    "ernie4-5-tied-biased": lambda: Ernie4_5Config(**_SIZES | _TIED, head_dim=48, use_bias=True),
    "gpt2": lambda: GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt2-tied-narrow": lambda: GPT2Config(**_GPT2 | _TIED, n_inner=80, activation_function="relu"),
    "gpt-neox": lambda: GPTNeoXConfig(**_GPT_NEOX, hidden_act="gelu_fast"),
    "gpt-neox-in-turn-unbiased": lambda: GPTNeoXConfig(
        **_GPT_NEOX, use_parallel_residual=False, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "phi": lambda: PhiConfig(**_SIZES | {"hidden_size": 64, "num_attention_heads": 2}),
    "nemotron": lambda: NemotronConfig(**_SIZES, head_dim=32),
    "starcoder2": lambda: Starcoder2Config(**_SIZES, sliding_window=WINDOW),
    "starcoder2-tied-unbiased": lambda: Starcoder2Config(**_SIZES | _TIED, use_bias=False, hidden_act="gelu"),
    "stablelm": lambda: StableLmConfig(**_SIZES | {"hidden_size": 64, "num_attention_heads": 2}),
    "stablelm-side-by-side": lambda: StableLmConfig(
        **_SIZES | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}, use_qkv_bias=True,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "opt": lambda: OPTConfig(**_OPT),
    "opt-tied-unbiased": lambda: OPTConfig(**_OPT | _TIED, enable_bias=False, activation_function="gelu"),
}  # fmt: skip

BIDIRECTIONAL: dict[str, Callable[[], Any]] = {
    "llama in both directions": lambda: LlamaConfig(**_SIZES | _BOTH_WAYS, head_dim=16),
    "gemma2 in both directions": lambda: Gemma2Config(**_SIZES | _BOTH_WAYS, **_GEMMA, attn_logit_softcapping=3.0),
    "gemma3 in both directions": lambda: Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3}, **_GEMMA, rope_parameters=_GEMMA3_ROPES, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}  # fmt: skip
"""Models that compute embeddings, as their tokens see later ones."""

NOT_DESCRIBED: dict[str, Callable[[], Any]] = {
    "gemma-both-directions": lambda: GemmaConfig(**_SIZES, head_dim=32, use_bidirectional_attention=True),
    "gemma2-both-directions": lambda: Gemma2Config(**_SIZES, **_GEMMA, use_bidirectional_attention=True),
    "hunyuan-dynamic": lambda: HunYuanDenseV1Config(
        **_SIZES,
        head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 20.0, "factor": 2.0},
    ),
    "smollm3-of-too-few-layers": lambda: SmolLM3Config(
        **_SIZES, no_rope_layers=[1], layer_types=["full_attention"] * 2
    ),
    "granite4-scale-by-default": lambda: GraniteMoeHybridConfig(**_SIZES, **_GRANITE4, attention_multiplier=None),
    "granite-without-what-layers-add": lambda: GraniteConfig(**_SIZES, residual_multiplier=0.0),
    "granite4-experts": lambda: GraniteMoeHybridConfig(**_SIZES, **_GRANITE4 | {"num_local_experts": 4}),
    "granite4-states": lambda: GraniteMoeHybridConfig(
        **_SIZES, **_GRANITE4 | {"layer_types": ["full_attention", "linear_attention"]}
    ),
    "gpt2-cross-attention": lambda: GPT2Config(**_GPT2, add_cross_attention=True),
    "gpt2-activation": lambda: GPT2Config(**_GPT2, activation_function="tanh"),
    "gpt-neox-odd": lambda: GPTNeoXConfig(**_GPT_NEOX, rope_parameters={"partial_rotary_factor": 0.1}),
    "gpt-neox-of-two-sizes-of-heads": lambda: GPTNeoXConfig(**_GPT_NEOX | {"head_dim": 16}),
    "gpt-neox-dynamic": lambda: GPTNeoXConfig(**_GPT_NEOX, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "cohere-with-norms-of-heads": lambda: CohereConfig(**_SIZES, use_qk_norm=True),
    "cohere-without-logits": lambda: CohereConfig(**_SIZES, logit_scale=0.0),
    "cohere2-without-a-window": lambda: Cohere2Config(**_SIZES, sliding_window=None),
    "phi-with-norms-of-heads": lambda: PhiConfig(**_SIZES, qk_layernorm=True),
    "phi-tied": lambda: PhiConfig(**_SIZES | _TIED),
    "stablelm-with-norms-of-heads": lambda: StableLmConfig(**_SIZES, qk_layernorm=True),
    "opt-350m": lambda: OPTConfig(**_OPT, do_layer_norm_before=False),
    "opt-projected": lambda: OPTConfig(**_OPT, word_embed_proj_dim=32),
    "opt-without-weights-of-norms": lambda: OPTConfig(**_OPT, layer_norm_elementwise_affine=False),
    "opt-without-the-last-norm": lambda: OPTConfig(**_OPT, _remove_final_layer_norm=True),
}
"""Configs of the same architectures that a description cannot express."""
