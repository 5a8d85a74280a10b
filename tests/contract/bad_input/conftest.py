"""One gateway for all cases: its listeners are real, and nothing of a bad request may reach its scheduler."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from gateway_harness import Harness, encoded, running_gateway
from scripted_scheduler import answer_with
from tiny_model import EOS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(model_directory: Path) -> AsyncIterator[Harness]:
    """The gateway of a module. At the end it still answers."""
    async with running_gateway(model_directory) as harness:
        yield harness
        assert not harness.scheduler.all("submit")
        harness.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        answer = await harness.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 200
