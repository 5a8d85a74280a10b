"""Streams at a steady rate, and the gaps between their tokens."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from types import TracebackType
from typing import Self

from benchmarks.processes import BenchmarkFailed
from quire_client.bench.latency import RequestTimings, TokenArrival
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import BenchTarget


class Streams:
    """Streams that generate until the end of `async with`. Each request must allow more tokens than are waited for."""

    def __init__(self, calls: Sequence[tuple[BenchTarget, MixRequest]]) -> None:
        """A stream for each request, from its target."""
        self._calls = calls
        self._arrivals: list[list[TokenArrival]] = [[] for _ in calls]
        self._counts = [0] * len(calls)
        self._wanted = [0] * len(calls)
        self._num_behind = 0  # streams that have fewer tokens than are waited for
        self._changed = asyncio.Event()  # set when none is behind, and when one has ended
        self._tasks: list[asyncio.Task[RequestTimings]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._calls))]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def advance(self, num_tokens: int) -> None:
        """Returns when each stream has had so many more tokens. Raises BenchmarkFailed where one has ended by then, or
        what its request raises.
        """
        # Once per wait, not once per token: the load generator shares the processors with the server.
        self._wanted = [count + num_tokens for count in self._counts]
        self._num_behind = len(self._wanted)
        while self._num_behind:
            for task in self._tasks:
                if task.done():
                    raise BenchmarkFailed(f"a stream ended after {task.result().num_tokens} tokens")
            self._changed.clear()
            await self._changed.wait()

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams so far."""
        return sum(self._counts)

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds before each token of all streams, of those gaps that reach into the time from `start` to `end`.

        A chunk of k tokens after a gap g counts as k gaps of g/k.
        """
        gaps = []
        for arrivals in self._arrivals:
            for before, after in pairwise(arrivals):
                if after.at > start and before.at < end:
                    gaps += [(after.at - before.at) / after.num_tokens] * after.num_tokens
        return gaps

    async def _run(self, place: int) -> RequestTimings:
        def on_tokens(count: int) -> None:
            self._arrivals[place].append(TokenArrival(perf_counter(), count))
            was_behind = self._counts[place] < self._wanted[place]
            self._counts[place] += count
            if was_behind and self._counts[place] >= self._wanted[place]:
                self._num_behind -= 1
                if not self._num_behind:
                    self._changed.set()

        target, request = self._calls[place]
        return await target.run(request, on_tokens)
