"""The latency metrics, for timestamps with known results."""

import random

import numpy as np
import pytest

from quire_client.bench.latency import Distribution, RequestTimings, TokenArrival, percentile, spread_evenly, summarize


def timeline(sent: float, *arrivals: tuple[float, int]) -> RequestTimings:
    return RequestTimings(sent, tuple(TokenArrival(at, num_tokens) for at, num_tokens in arrivals))


def test_time_to_first_token_runs_from_sending() -> None:
    assert timeline(10.0, (10.5, 3), (11.0, 1)).time_to_first_token == 0.5


def test_a_gap_is_shared_by_the_tokens_that_end_it() -> None:
    assert timeline(0.0, (1.0, 1), (1.25, 1), (2.25, 4)).gaps == [0.25, 0.25, 0.25, 0.25, 0.25]


def test_tokens_that_come_with_the_first_have_no_gap() -> None:
    assert timeline(0.0, (1.0, 3), (1.5, 1)).gaps == [0.5]


def test_gaps_add_up_to_the_time_of_the_stream() -> None:
    rng = random.Random(1)
    times = np.cumsum([rng.uniform(0.01, 1) for _ in range(50)]).tolist()
    stream = timeline(0.0, *((at, rng.randint(1, 5)) for at in times))

    assert sum(stream.gaps) == pytest.approx(times[-1] - times[0])
    assert len(stream.gaps) == stream.num_tokens - stream.arrivals[0].num_tokens


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: int) -> None:
    values = sorted(random.Random(count).uniform(0, 10) for _ in range(count))

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_a_distribution_does_not_depend_on_the_order() -> None:
    values = [0.5, 0.1, 0.4, 0.2, 0.3]

    assert Distribution.of(values) == Distribution.of(sorted(values))
    assert Distribution.of([]) is None


def test_throughput_counts_from_the_first_request_to_the_last_token() -> None:
    summary = summarize([timeline(100.0, (101.0, 1), (103.0, 5)), timeline(102.0, (105.0, 2))], prompt_tokens=30)

    assert summary.wall_seconds == 5.0
    assert (summary.num_requests, summary.prompt_tokens, summary.output_tokens) == (2, 30, 8)
    assert (summary.output_tokens_per_second, summary.requests_per_second) == (1.6, 0.4)
    assert (summary.time_to_first_token.p50, summary.inter_token) == (2.0, Distribution(0.4, 0.4, 0.4))


def test_streams_of_one_arrival_have_no_inter_token_latency() -> None:
    assert summarize([timeline(0.0, (1.0, 3))], prompt_tokens=1).inter_token is None


def test_nothing_cannot_be_summarized() -> None:
    with pytest.raises(ValueError, match="nothing"):
        summarize([], 0)


@pytest.mark.parametrize(
    ("num_times", "num_tokens", "counts"),
    [(3, 3, [1, 1, 1]), (3, 7, [2, 2, 3]), (4, 2, [1, 1]), (1, 9, [9]), (2, 0, [])],
)
def test_tokens_are_spread_over_chunks_as_whole_tokens(num_times: int, num_tokens: int, counts: list[int]) -> None:
    arrivals = spread_evenly([float(i) for i in range(num_times)], num_tokens)

    assert [arrival.num_tokens for arrival in arrivals] == counts
