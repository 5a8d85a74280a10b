"""Synthetic requests have the requested rate, lengths and shared prefixes; a seed repeats them."""

from collections import Counter
from itertools import islice

import pytest

from benchmarks.simulator.synthetic import ArrivalProcess, ArrivalStream, Lengths, Prefixes

STREAM = ArrivalStream(rate=10.0, prompt=Lengths(16, 64), output=Lengths(8, 8))


def times(stream: ArrivalStream, count: int) -> list[float]:
    return [arrival.at for arrival in stream.arrivals(0, count)]


def test_a_seed_gives_the_same_requests_and_another_one_does_not() -> None:
    assert list(STREAM.arrivals(3, 50)) == list(STREAM.arrivals(3, 50))
    assert list(STREAM.arrivals(3, 50)) != list(STREAM.arrivals(4, 50))


def test_more_requests_begin_with_those_of_fewer() -> None:
    assert list(islice(STREAM.arrivals(0), 20)) == list(STREAM.arrivals(0, 30))[:20]


def test_requests_come_at_the_rate() -> None:
    assert times(STREAM, 5_000)[-1] == pytest.approx(500, rel=0.05)


def test_even_requests_are_as_far_apart_as_each_other() -> None:
    even = ArrivalStream(4.0, Lengths(1, 1), Lengths(1, 1), process=ArrivalProcess.EVEN)
    assert times(even, 4) == [0.0, 0.25, 0.5, 0.75]


def test_a_burst_comes_at_once_and_the_rate_is_kept() -> None:
    bursts = ArrivalStream(10.0, Lengths(1, 1), Lengths(1, 1), process=ArrivalProcess.BURSTS, burst=5)
    at = times(bursts, 5_000)
    assert set(Counter(at).values()) == {5}
    assert at[-1] == pytest.approx(500, rel=0.1)


def test_all_at_once() -> None:
    assert set(times(ArrivalStream(1.0, Lengths(1, 1), Lengths(1, 1), process=ArrivalProcess.AT_ONCE), 9)) == {0.0}


def test_lengths_are_within_their_bounds_and_reach_them() -> None:
    lengths = {arrival.prompt_tokens for arrival in STREAM.arrivals(0, 2_000)}
    assert (min(lengths), max(lengths)) == (16, 64)
    assert {arrival.output_tokens for arrival in STREAM.arrivals(0, 50)} == {8}


def test_the_mean_length_is_the_average_of_samples() -> None:
    drawn = [arrival.prompt_tokens for arrival in STREAM.arrivals(0, 5_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(STREAM.prompt.mean, rel=0.02)
    assert STREAM.output.mean == 8


def test_classes_come_as_often_as_they_weigh() -> None:
    stream = ArrivalStream(1.0, Lengths(1, 1), Lengths(1, 1), priorities=((0, 3.0), (2, 1.0)))
    drawn = Counter(arrival.priority for arrival in stream.arrivals(0, 4_000))
    assert set(drawn) == {0, 2}
    assert drawn[0] / drawn[2] == pytest.approx(3, rel=0.1)


def test_some_prompts_begin_with_a_prefix_and_are_as_much_longer() -> None:
    stream = ArrivalStream(1.0, Lengths(5, 5), Lengths(1, 1), prefixes=Prefixes(count=3, num_tokens=100, share=0.25))
    arrivals = list(stream.arrivals(0, 4_000))
    with_prefix = [arrival for arrival in arrivals if arrival.prefix is not None]
    assert len(with_prefix) / len(arrivals) == pytest.approx(0.25, rel=0.1)
    assert len({arrival.prefix for arrival in with_prefix}) == 3
    assert {arrival.prompt_tokens for arrival in with_prefix} == {105}


def test_max_tokens_may_exceed_the_output() -> None:
    stream = ArrivalStream(1.0, Lengths(1, 1), Lengths(4, 4), max_tokens=100)
    (arrival,) = stream.arrivals(0, 1)
    assert (arrival.output_tokens, arrival.max_tokens) == (4, 100)
