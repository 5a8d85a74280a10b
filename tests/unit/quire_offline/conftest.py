"""A tiny random model with a tokenizer and a chat template, served in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offline_model import SMALL, save_offline_model
from quire_offline import LLM


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads slow down models as small as these, especially on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model."""
    return save_offline_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def load(model: Path) -> Iterator[Callable[..., LLM]]:
    """Loads the model with further settings, and closes it after the module's tests."""
    loaded: list[LLM] = []

    def make(**options: Any) -> LLM:
        loaded.append(LLM(str(model), **{**SMALL, **options}))
        return loaded[-1]

    yield make
    for llm in loaded:
        llm.close()


@pytest.fixture(scope="module")
def llm(load: Callable[..., LLM]) -> LLM:
    return load(num_blocks=96)
