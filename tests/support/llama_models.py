"""Tiny random models of the Llama family on disk, and their greedy continuations by transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
_SIZES_BY_WIDTH = {name: size for name, size in SIZES.items() if name != "head_dim"}

VARIANTS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied-biased": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-rope-linear": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama-rope-llama3": lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3),
    "llama-rope-yarn": lambda: LlamaConfig(**SIZES, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=20),
    "qwen2": lambda: Qwen2Config(**_SIZES_BY_WIDTH),
    "qwen2-window": lambda: Qwen2Config(
        **_SIZES_BY_WIDTH, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3-window": lambda: Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
}


def save_model(directory: Path, config: Any, kind: Any = AutoModelForCausalLM, **options: Any) -> Path:
    """Write a random model of a config, biases and norms random too; `kind` is one of transformers' classes of them."""
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "router.scale", "per_expert_scale")) or "norm" in name or ".ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter) + 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(directory, **options)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def save_servable(directory: Path, config: Any, tokenizer: Tokenizer) -> Path:
    """Writes a random model with a tokenizer, as a deployment serves it."""
    save_model(directory, config)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    return directory


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens."""
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def hidden_states(directory: Path, prompt: list[int]) -> torch.Tensor:
    """Of one prompt alone, after the last norm [num_tokens, hidden_size], by transformers' model without a head."""
    # Eager: see `generate`.
    model: Any = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    states: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    return states


def generate(
    directory: Path, prompts: list[list[int]], num_tokens: int, device: str = "cpu", kind: Any = AutoModelForCausalLM
) -> list[list[int]]:
    """Greedy continuations by transformers' own generate in float32, each prompt alone; `kind` as in `save_model`."""
    # Eager: attention by torch's SDPA leaves Gemma 2's cap of scores out in some versions of transformers.
    model: Any = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.to(device)
    return [
        model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=num_tokens,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
