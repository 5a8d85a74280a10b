"""Fixtures of the end-to-end tests: models, and continuations by transformers.

The default model is for what judges its own answers or its tokens at full depth. Most tests ask what a deployment does
with requests; they have `shallow_model`, or a tiny one.
"""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks.deployment import prepare_model
from llama_models import SIZES, save_servable
from reference import Reference, kept_references
from tiny_model import tiny_tokenizer


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the default model, prepared once."""
    directory = prepare_model().path
    assert "shallow" not in str(directory), (
        "this fixture must be used before `shallow_model`, which replaces the default"
    )
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model with 270 tokens and 2 layers: its workers start in seconds, and tokens take 1 ms."""
    tokenizer = tiny_tokenizer()
    sizes = SIZES | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    return save_servable(tmp_path_factory.mktemp("tiny-model"), LlamaConfig(**sizes), tokenizer)


@pytest.fixture(scope="session")
def judged(model: Path) -> list[Reference]:
    """The forty prompts with their reference continuations."""
    return kept_references(model)


@pytest.fixture(scope="module")
def shallow_judged(shallow_model: Path) -> list[Reference]:
    """The forty prompts with the continuations of the shallow model."""
    return kept_references(shallow_model)
