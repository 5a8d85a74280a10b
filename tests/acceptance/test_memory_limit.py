"""A short load below a limit of memory; and what is counted as wrong."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.acceptance.memory_cgroup import own_cgroup
from tests.acceptance.memory_limit import Outcome, compare, measure
from tests.acceptance.memory_load import Load, Pace


def test_below_a_limit_nothing_is_killed_and_nothing_lost(shallow_model: object) -> None:
    # Lower than the defaults, so that a short load reaches both.
    thresholds = {"QUIRE_MEMORY_HIGH": "0.8", "QUIRE_MEMORY_CRITICAL": "0.86"}
    # The two speeds are measured for seconds each, beside other tests.
    outcome = measure(
        streams=12, seconds=5.0, unlimited_seconds=2.0, num_blocks=512, thresholds=thresholds, least_speed=0.0
    )
    assert outcome.errors == []
    assert outcome.limited is not None
    assert outcome.limited.streams_ended > 0
    assert outcome.seconds_short > 0
    assert outcome.speed > 0
    with own_cgroup() as cgroup:
        assert outcome.in_cgroup == (cgroup is not None)
    assert outcome.limit == outcome.kernel_limit or not outcome.in_cgroup


def test_beyond_the_limit_of_a_cgroup_the_kernel_kills() -> None:
    with own_cgroup() as cgroup:
        if cgroup is None:
            pytest.skip("no cgroup may be made here")
        cgroup.set_limit(64 * 2**20)
        assert cgroup.limit == 64 * 2**20

        def allocate(mebibytes: int) -> int:
            program = f"text = b'x' * ({mebibytes} * 2**20)"
            return subprocess.run([*cgroup.launcher, sys.executable, "-S", "-c", program], check=False).returncode

        assert allocate(1) == 0
        assert cgroup.num_killed == 0
        assert allocate(128) == -9
        assert cgroup.num_killed == 1
    assert not cgroup.folder.exists()


def test_the_load_is_compared_with_the_same_one_without_the_limit() -> None:
    def pace(tokens_per_second: float) -> Pace:
        return Pace(10.0, round(10 * tokens_per_second), tokens_per_second, 1, 0.1, 0.2)

    slower = Outcome(limited=pace(80.0), unlimited=pace(100.0))
    compare(slower)
    assert (slower.speed, slower.errors) == (0.8, [])
    stalled = Outcome(limited=pace(5.0), unlimited=pace(100.0))
    compare(stalled)
    assert stalled.errors == ["below the limit the load has 5.0% of its speed"]
    unknown = Outcome(limited=pace(5.0))
    compare(unknown)
    assert unknown.errors == ["without a limit no tokens came"]


class Client:
    """Answers each request with its number of tokens, or less, or others than before."""

    def __init__(self) -> None:
        self.lacks = self.first = 0

    async def stream(self, prompt: list[int], max_tokens: int, **options: object) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        yield SimpleNamespace(token_ids=[self.first] * (max_tokens - self.lacks))


async def test_missing_and_other_tokens_are_found() -> None:
    client, errors = Client(), list[str]()
    load = Load(client, 100, errors)  # type: ignore[arg-type]
    await load.learn()
    pace = await load.run(4, 0.01)
    assert errors == []
    assert pace.streams_ended > 0
    assert pace.tokens_per_second > 0
    assert pace.median_wait <= pace.longest_wait
    client.first = 1
    await load.run(4, 0.05)
    assert any("other tokens" in error for error in errors)
    client.lacks = 1
    await load.run(1, 0.01)
    assert any("tokens" in error and " of " in error for error in errors)
