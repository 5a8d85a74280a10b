"""Fixtures of the gateway's contract tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_harness import Harness, running_gateway
from tiny_model import make_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return make_model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def quire(model_directory: Path) -> AsyncIterator[Harness]:
    """A ready gateway, new for each test."""
    async with running_gateway(model_directory) as harness:
        yield harness
