"""Tiny random models of BERT's form on disk, and their last hidden states and scores by transformers."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedModel

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
# Heads of 16, which the compiled kernels take.
_OF_HEADS = {**_SIZES, "num_attention_heads": 3}
# Two more positions, before those of tokens. The token 1 is for padding, and has no position.
_ROBERTA_SIZES = {**_OF_HEADS, "max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1, "pad_token_id": 1}

_DISTILBERT_SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 3,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
# Heads of 32, of which the compiled kernels rotate halves of 16, in float32.
_ROTARY_SIZES = {**_OF_HEADS, "hidden_size": 96, "initializer_range": 0.15, "pad_token_id": 0}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _OF_HEADS),
    "camembert": ("Camembert", _ROBERTA_SIZES),
    "distilbert": ("DistilBert", _DISTILBERT_SIZES),
    "electra": ("Electra", {**_OF_HEADS, "embedding_size": 48}),
    "gte": ("Gte", _ROTARY_SIZES),
    "mpnet": ("MPNet", {**_OF_HEADS, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1}),
    "nomic_bert": ("NomicBert", _ROTARY_SIZES),
    "roberta": ("Roberta", _ROBERTA_SIZES),
    "xlm-roberta": ("XLMRoberta", _ROBERTA_SIZES),
}
"""Of BERT's form, by architecture: its name in transformers' classes, and the sizes of a model."""
_OF_DECODERS_FORM: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": (
        "ModernBert",
        {
            **_OF_HEADS,
            "num_hidden_layers": 4,
            "hidden_size": 96,
            "max_position_embeddings": 300,
            "local_attention": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "eurobert": (
        "EuroBert",
        {
            **_OF_HEADS,
            "hidden_size": 96,
            "max_position_embeddings": 300,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "mask_token_id": 3,
            "classifier_pooling": "mean",
        },
    ),
}


def save_bert(
    directory: Path,
    *,
    pooling: str | None = "mean",
    normalizes: bool = True,
    max_tokens: int | None = None,
    **sizes: Any,
) -> BertModel:
    """Writes a random model. With `pooling` it has the files of sentence-transformers."""
    model: BertModel = _save(BertModel, BertConfig(**{**_SIZES, **sizes}), directory)
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
    return model


def save_encoder(directory: Path, architecture: str, **config: Any) -> PreTrainedModel:
    """Writes a random model without files of sentence-transformers."""
    return _save_as("Model", directory, architecture, config)


def save_classifier(directory: Path, architecture: str, **config: Any) -> PreTrainedModel:
    """Writes a random model with a head of one label, which other options of its config may change."""
    return _save_as("ForSequenceClassification", directory, architecture, {"num_labels": 1, **config})


def save_cross_encoder(directory: Path, **config: Any) -> BertForSequenceClassification:
    """As `save_classifier`, of BERT."""
    model = save_classifier(directory, "bert", **config)
    assert isinstance(model, BertForSequenceClassification)
    return model


def save_masked_model(directory: Path, architecture: str) -> PreTrainedModel:
    """Writes a random model with the head of pre-training, which predicts hidden words, and returns its encoder."""
    return _encoder_of(_save_as("ForMaskedLM", directory, architecture, {}))


def save_model_of_pre_training(directory: Path, architecture: str) -> PreTrainedModel:
    """Writes a random model with all heads of pre-training, and returns its encoder."""
    return _encoder_of(_save_as("ForPreTraining", directory, architecture, {}))


def _encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    encoder = model.base_model
    assert isinstance(encoder, PreTrainedModel)
    return encoder


def _save_as(ending: str, directory: Path, architecture: str, config: dict[str, Any]) -> PreTrainedModel:
    """Writes a random model of the class with this ending."""
    name, sizes = {**ENCODERS, **_OF_DECODERS_FORM}[architecture]
    make_config, kind = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}{ending}")
    model: PreTrainedModel = _save(kind, make_config(**{**sizes, **config}), directory)
    return model


def _save(kind: Any, config: Any, directory: Path) -> Any:
    """Writes a random model, biases and norms random too, and a tokenizer."""
    torch.manual_seed(0)
    model = kind(config)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
    model.save_pretrained(directory)
    encoder_tokenizer().save(str(directory / "tokenizer.json"))
    return model


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, len(WORDS)) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, prompt: Sequence[int], num_first: int | None = None) -> Tensor:
    """Of one prompt alone [num_tokens, hidden_size]. The tokens after the first ones are of the second type."""
    states: Tensor = model(**_inputs(model, prompt, num_first)).last_hidden_state[0]
    return states


@torch.inference_mode()
def raw_score(model: PreTrainedModel, prompt: Sequence[int], num_first: int | None = None) -> float:
    """The output of a cross-encoder's head for one prompt alone."""
    return float(model(**_inputs(model, prompt, num_first)).logits[0, 0])


def _inputs(model: PreTrainedModel, prompt: Sequence[int], num_first: int | None) -> dict[str, Tensor]:
    if getattr(model.config, "type_vocab_size", None) is None:
        return {"input_ids": torch.tensor([list(prompt)])}
    first = len(prompt) if num_first is None else num_first
    second_type = min(1, model.config.type_vocab_size - 1)
    types = [0] * first + [second_type] * (len(prompt) - first)
    return {"input_ids": torch.tensor([list(prompt)]), "token_type_ids": torch.tensor([types])}
