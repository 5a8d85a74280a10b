"""Fixtures of the gateway's unit tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from gateway_sessions import MODEL, MODEL_INFO, SessionClient, dialling
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.tokenizer import ModelTokenizer
from scripted_scheduler import ScriptedScheduler, serving
from svc_common.grammars import load_grammar_tokenizer
from tiny_model import EOS, make_model_directory, tiny_tokenizer


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


@pytest.fixture(scope="session")
def grammars(model_directory: Path) -> Iterator[GrammarChecker]:
    """The checker of its constraints, with its process."""
    checker = GrammarChecker(model_directory / "tokenizer.json", [EOS])
    yield checker
    checker.close()


@pytest.fixture(scope="session")
def vocabulary() -> LLTokenizer:
    """Its vocabulary, as workers use it."""
    return load_grammar_tokenizer(tiny_tokenizer().to_str(), [EOS])


@pytest.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    """A leader that follows its script."""
    async with serving(ScriptedScheduler(MODEL)) as scheduler:
        yield scheduler


@pytest.fixture
async def client(scheduler: ScriptedScheduler) -> AsyncIterator[SessionClient]:
    """A gateway's session with it."""
    async with dialling(scheduler.address) as client:
        await client.wait_for(MODEL_INFO)
        yield client
