"""What the gateway's unit tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_svc.tokenizer import ModelTokenizer
from tiny_model import make_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return make_model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tokenizer(model_directory: Path) -> Iterator[ModelTokenizer]:
    """Its tokenizer."""
    tokenizer = ModelTokenizer.load(model_directory)
    yield tokenizer
    tokenizer.close()
