"""Streams are closed after their measurement; the target is a scripted one."""

import asyncio
from time import perf_counter

import pytest

from benchmarks.pressure.long_prompt import NUM_STREAMS, Streams, run_round
from benchmarks.processes import BenchmarkFailed
from quire_client.bench.latency import RequestTimings, TokenArrival
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import OnTokens, TargetModel


class Paced:
    """Sends a token for each request in each iteration of the event loop, up to `output_tokens`."""

    def __init__(self) -> None:
        self.open: list[MixRequest] = []
        self.beside: list[int] = []  # number of open streams when a prompt arrived
        self.prompts: list[tuple[int, ...]] = []

    async def model(self) -> TargetModel:
        return TargetModel("paced", None)

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        self.prompts.append(request.prompt_token_ids)
        if request.output_tokens == 1:
            self.beside.append(len(self.open))
        self.open.append(request)
        sent, arrivals = perf_counter(), []
        try:
            for _ in range(request.output_tokens):
                await asyncio.sleep(0)
                arrivals.append(TokenArrival(perf_counter(), 1))
                on_tokens(1)
            return RequestTimings(sent, tuple(arrivals))
        finally:
            self.open.remove(request)


def requests(count: int, output_tokens: int) -> list[MixRequest]:
    return [MixRequest((i,), output_tokens) for i in range(count)]


async def test_streams_go_on_until_they_are_closed() -> None:
    target = Paced()
    async with Streams(target, requests(3, 1000)) as streams:
        start = perf_counter()
        await streams.advance(5)
        middle = perf_counter()
        await streams.advance(7)
        assert len(target.open) == 3
        before, whole = len(streams.gaps(start, middle)), len(streams.gaps(start, perf_counter()))
    assert target.open == []
    assert 3 * 4 <= before < whole
    assert whole >= 3 * 11


async def test_a_gap_counts_that_reaches_into_the_window() -> None:
    async with Streams(Paced(), requests(1, 1000)) as streams:
        await streams.advance(3)
        now = perf_counter()
        await streams.advance(3)
        assert len(streams.gaps(now, now)) == 1
        assert streams.gaps(perf_counter(), perf_counter()) == []


async def test_a_stream_that_ends_too_early_is_no_figure() -> None:
    async with Streams(Paced(), requests(2, 4)) as streams:
        with pytest.raises(BenchmarkFailed, match="ended after 4 tokens"):
            await streams.advance(5)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_turn_has_streams_alone_the_prompt_among_them_and_alone(number: int) -> None:
    target = Paced()
    run = await run_round(target, number, 50)
    assert target.beside == [NUM_STREAMS, 0]
    assert len(set(target.prompts)) == len(target.prompts) == 2 * NUM_STREAMS + 2
    assert 0 < run.alone_p50 <= run.alone_p99
    assert 0 < run.beside_p50 <= run.beside_p99
    assert min(run.first_token_alone, run.first_token_beside) > 0
