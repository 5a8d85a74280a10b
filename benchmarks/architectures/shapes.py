"""Models of about 300M active parameters with random weights, written as checkpoints."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
_COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Shape:
    """An architecture by its `model_type`, and the arguments of its config."""

    model_type: str
    title: str
    config: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the config but the size of the vocabulary."""
        return {**_COMMON, **self.config}

    def write(self, folder: Path, tokenizer: Path, vocab_size: int) -> int:
        """Writes a checkpoint in bfloat16 with the tokenizer of a directory. Returns how many parameters it has."""
        config = AutoConfig.for_model(self.model_type, vocab_size=vocab_size, **self.settings)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        for name in _TOKENIZER:
            if (tokenizer / name).exists():
                shutil.copy(tokenizer / name, folder)
        return int(model.num_parameters())


SHAPES = {
    "dense": Shape(
        "phi3",
        "Phi-3, dense",
        {"num_hidden_layers": 20, "num_key_value_heads": 16, "intermediate_size": 2816},
    ),
    "experts": Shape(
        "olmoe",
        "OLMoE, 8 of 32 experts",
        {
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 512,
            "num_experts": 32,
            "num_experts_per_tok": 8,
        },
    ),
}
