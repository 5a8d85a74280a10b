"""Tiny random models of BERT's form on disk, and their last hidden states by transformers."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from encoder_model import WORDS, encoder_tokenizer

CONTEXT = 64
_SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}


def save_bert(
    directory: Path,
    *,
    pooling: str | None = "mean",
    normalizes: bool = True,
    max_tokens: int | None = None,
    **sizes: Any,
) -> BertModel:
    """Writes a random model, biases and norms random too. With `pooling` it has the files of sentence-transformers."""
    torch.manual_seed(0)
    model: Any = BertModel(BertConfig(**{**_SIZES, **sizes}))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
    model.save_pretrained(directory)
    encoder_tokenizer().save(str(directory / "tokenizer.json"))
    if pooling is not None:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
        modules = [
            {"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"sentence_transformers.models.{kind}"}
            for kind in kinds
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir(exist_ok=True)
        switches = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
        config = {f"pooling_mode_{name}": kind == pooling for kind, name in switches.items()}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **config}))
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens or CONTEXT}))
    bert: BertModel = model
    return bert


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(len(WORDS)) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def hidden_states(model: BertModel, prompt: Sequence[int]) -> Tensor:
    """Of one prompt alone [num_tokens, hidden_size]."""
    states: Tensor = model(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states
