"""A short load below a limit of memory; and what is counted as wrong."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from tests.acceptance.memory_limit import Load, Outcome, measure


def test_below_a_limit_nothing_is_killed_and_nothing_lost() -> None:
    # Lower than the defaults, so that a short load reaches both.
    thresholds = {"QUIRE_MEMORY_HIGH": "0.8", "QUIRE_MEMORY_CRITICAL": "0.86"}
    outcome = measure(streams=12, seconds=12.0, num_blocks=512, thresholds=thresholds)
    assert outcome.errors == []
    assert outcome.streams_ended > 0
    assert outcome.seconds_short > 0


class Client:
    """Answers each request with its number of tokens, or less, or others than before."""

    def __init__(self) -> None:
        self.lacks = self.first = 0

    async def stream(self, prompt: list[int], max_tokens: int, **options: object) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        yield SimpleNamespace(token_ids=[self.first] * (max_tokens - self.lacks))


async def test_missing_and_other_tokens_are_found() -> None:
    client, outcome = Client(), Outcome()
    load = Load(client, 100, outcome)  # type: ignore[arg-type]
    await load.learn()
    await load.run(4, 0.01)
    assert outcome.errors == []
    assert outcome.streams_ended > 0
    client.first = 1
    await load.run(4, 0.05)
    assert any("other tokens" in error for error in outcome.errors)
    client.lacks = 1
    await load.run(1, 0.01)
    assert any("tokens" in error and " of " in error for error in outcome.errors)
