"""Requests that generate at once until they are closed, and the gaps between their tokens in a window of time."""

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
    """Streams of requests, open from `async with` to its end. Each must be good for more tokens than are waited for."""

    def __init__(self, target: BenchTarget, requests: Sequence[MixRequest]) -> None:
        self._target, self._requests = target, requests
        self._arrivals: list[list[TokenArrival]] = [[] for _ in requests]
        self._counts = [0] * len(requests)
        self._came = asyncio.Event()
        self._tasks: list[asyncio.Task[RequestTimings]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._requests))]
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
        wanted = [count + num_tokens for count in self._counts]
        while any(count < enough for count, enough in zip(self._counts, wanted, strict=True)):
            self._came.clear()
            waiter = asyncio.create_task(self._came.wait())
            await asyncio.wait([waiter, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            for task in self._tasks:
                if task.done():
                    raise BenchmarkFailed(f"a stream ended after {task.result().num_tokens} tokens")

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
            self._counts[place] += count
            self._came.set()

        return await self._target.run(self._requests[place], on_tokens)
