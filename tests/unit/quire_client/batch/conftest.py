"""A scripted server, and batches of a few lines for it."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from quire_client.batch import retries
from scripted_http_api import ScriptedApi, scripted_api

MakeInput = Callable[..., str]


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedApi]:
    """A server; waits between calls are short."""
    monkeypatch.setattr(retries, "_FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(retries, "_MAX_BACKOFF", 0.02)
    async with scripted_api() as api:
        yield api


@pytest.fixture
def make_input(tmp_path: Path) -> MakeInput:
    """Writes an input whose requests have the prompts 0, 1, … and returns its path."""

    def write(count: int, url: str = "/v1/completions") -> str:
        path = tmp_path / "in.jsonl"
        lines = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": {"prompt": str(i)}} for i in range(count)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return str(path)

    return write
