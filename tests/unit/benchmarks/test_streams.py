"""Streams are closed after their measurement; the target is a scripted one."""

from time import perf_counter

import pytest

from benchmarks.processes import BenchmarkFailed
from benchmarks.streams import Streams
from paced_target import Paced
from quire_client.bench.mix import MixRequest


def requests(count: int, output_tokens: int) -> list[MixRequest]:
    return [MixRequest((i,), output_tokens) for i in range(count)]


async def test_streams_go_on_until_they_are_closed() -> None:
    target = Paced()
    async with Streams([(target, request) for request in requests(3, 1000)]) as streams:
        start = perf_counter()
        await streams.advance(5)
        middle = perf_counter()
        await streams.advance(7)
        assert len(target.open) == 3
        assert streams.num_tokens >= 3 * 12
        before, whole = len(streams.gaps(start, middle)), len(streams.gaps(start, perf_counter()))
    assert target.open == []
    assert 3 * 4 <= before < whole
    assert whole >= 3 * 11


async def test_a_gap_counts_that_reaches_into_the_window() -> None:
    async with Streams([(Paced(), request) for request in requests(1, 1000)]) as streams:
        await streams.advance(3)
        now = perf_counter()
        await streams.advance(3)
        assert len(streams.gaps(now, now)) == 1
        assert streams.gaps(perf_counter(), perf_counter()) == []


async def test_a_stream_that_ends_too_early_is_no_figure() -> None:
    async with Streams([(Paced(), request) for request in requests(2, 4)]) as streams:
        with pytest.raises(BenchmarkFailed, match="ended after 4 tokens"):
            await streams.advance(5)
