"""Fixtures of the gateway's contract tests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import uvicorn.server
from grpc_health.v1 import health_pb2

from encoder_model import make_encoder_directory
from gateway_harness import Harness, gateway_at, running_gateway, scheduler_model
from official_client import official_client
from scripted_scheduler import ScriptedScheduler, serving
from tiny_model import make_model_directory


class _QuickAsyncio:
    """asyncio for uvicorn's server, whose pauses of 0.1 seconds would be most of the time of a test with a gateway."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(scope="session", autouse=True)
def quick_ends() -> Iterator[None]:
    """Gateways in this process notice at once that they are to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _QuickAsyncio())
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return make_model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def encoder_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as BERT."""
    return make_encoder_directory(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture
async def quire(model_directory: Path) -> AsyncIterator[Harness]:
    """A ready gateway, new for each test."""
    async with running_gateway(model_directory) as harness:
        yield harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_gateway(model_directory: Path) -> AsyncIterator[Harness]:
    """A ready gateway for the tests of a module. They run in the module's event loop and change no state of it."""
    async with running_gateway(model_directory) as harness:
        yield harness


@pytest.fixture
def shared(module_gateway: Harness) -> Harness:
    """The module's gateway. Its scheduler has received nothing yet, and has no script."""
    module_gateway.scheduler.reset()
    return module_gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(quire: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a module whose tests and `quire` are in the module's event loop."""
    async with official_client(quire) as official:
        yield official


@pytest.fixture
async def pair(model_directory: Path) -> AsyncIterator[tuple[Harness, ScriptedScheduler]]:
    """A ready gateway, and a standby scheduler."""
    model = scheduler_model(model_directory)
    async with serving(ScriptedScheduler(model)) as leader, serving(ScriptedScheduler(model, epoch=2)) as standby:
        standby.is_leader = False
        async with gateway_at(leader, model_directory, [leader.address, standby.address]) as quire:
            await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            yield quire, standby
