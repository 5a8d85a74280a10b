"""Keeps a number of requests in flight until all are answered, and records the arrivals of their tokens."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire_client.bench.latency import BenchSummary, RequestTimings, summarize
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import BenchTarget, OnTokens, TargetError
from quire_client.errors import QuireError


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of all requests. `failures` counts requests by their errors.

    `num_short` counts requests with fewer or more tokens than requested: their server does not ignore end-of-text, and
    its figures are not comparable.
    """

    timelines: list[RequestTimings]
    prompt_tokens: int
    failures: Counter[str]
    num_short: int

    @property
    def summary(self) -> BenchSummary | None:
        """Figures over the requests that were answered; None where there are none."""
        return summarize(self.timelines, self.prompt_tokens) if self.timelines else None


async def run_load(
    target: BenchTarget,
    requests: Sequence[MixRequest],
    concurrency: int,
    on_tokens: OnTokens = lambda count: None,
    on_end: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Sends `requests` in their order, at most `concurrency` at a time. `on_end` is called at each request's end."""
    timelines: list[RequestTimings] = []
    failures: Counter[str] = Counter()
    prompt_tokens = 0
    num_short = 0
    waiting = iter(requests)

    async def send_one_after_another() -> None:
        nonlocal prompt_tokens, num_short
        for request in waiting:
            try:
                timeline = await target.run(request, on_tokens)
            except (QuireError, TargetError) as error:
                failures[str(error)] += 1
            else:
                timelines.append(timeline)
                prompt_tokens += len(request.prompt_token_ids)
                num_short += timeline.num_tokens != request.output_tokens
            on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(send_one_after_another())
    return LoadResult(timelines, prompt_tokens, failures, num_short)
