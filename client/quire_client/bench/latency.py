"""Definitions of what is measured of a server under load.

Time to first token (TTFT): from sending a request to its first token, with all waiting in between.
Inter-token latency (ITL): the gaps between the tokens of one stream; a chunk of k tokens after a gap g counts as k gaps
of g/k. Tokens that came together with the first one have no gap and are not counted.
Output tokens per second: all output tokens, over the time from the first request sent to the last token of all.
Percentiles interpolate linearly between the nearest ranks, as numpy does by default.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """Tokens that came together. `at` is in seconds of the clock of `sent`."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When one request was sent and when its tokens came, in order; at least one arrival, none of them empty."""

    sent: float
    arrivals: tuple[TokenArrival, ...]

    @property
    def num_tokens(self) -> int:
        """Of all arrivals."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def time_to_first_token(self) -> float:
        """In seconds."""
        return self.arrivals[0].at - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds before each token after the first arrival."""
        gaps = []
        for before, after in pairwise(self.arrivals):
            gaps += [(after.at - before.at) / after.num_tokens] * after.num_tokens
        return gaps


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None where there are no values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(percentile(ordered, percent) for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """Figures of a load. `inter_token` is None where no stream had two arrivals."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    wall_seconds: float
    output_tokens_per_second: float
    requests_per_second: float
    time_to_first_token: Distribution
    inter_token: Distribution | None


def summarize(timelines: Sequence[RequestTimings], prompt_tokens: int) -> BenchSummary:
    """The figures of successful requests, whose prompts had `prompt_tokens` tokens in all.

    Raises ValueError where there are none.
    """
    first_tokens = Distribution.of([timeline.time_to_first_token for timeline in timelines])
    if first_tokens is None:
        raise ValueError("there is nothing to summarize")
    wall = max(t.arrivals[-1].at for t in timelines) - min(t.sent for t in timelines)
    output_tokens = sum(timeline.num_tokens for timeline in timelines)
    return BenchSummary(
        num_requests=len(timelines),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        wall_seconds=wall,
        output_tokens_per_second=output_tokens / wall,
        requests_per_second=len(timelines) / wall,
        time_to_first_token=first_tokens,
        inter_token=Distribution.of([gap for timeline in timelines for gap in timeline.gaps]),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, at least one; interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_evenly(times: Sequence[float], num_tokens: int) -> tuple[TokenArrival, ...]:
    """Arrivals at `times` of a stream of which only the number of tokens is known: evenly, as whole tokens.

    Where there are fewer tokens than times, the times that get none are left out.
    """
    shares = [num_tokens * i // len(times) for i in range(len(times) + 1)]
    counts = [high - low for low, high in pairwise(shares)]
    return tuple(TokenArrival(at, count) for at, count in zip(times, counts, strict=True) if count)
