"""Synthetic arrivals: streams of requests by rate, lengths, prefixes and classes, the same for the same seed."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from benchmarks.simulator.arrivals import Arrival, Prefix


class ArrivalProcess(Enum):
    """How a stream's requests are spread over time."""

    POISSON = "poisson"
    EVEN = "even"
    BURSTS = "bursts"  # `burst` at once, at the same rate, with gaps as in POISSON
    AT_ONCE = "at once"  # all at the start


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens from `low` to `high`, both included, whose logarithm is uniform."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        if self.low == self.high:
            return self.low
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

    @property
    def mean(self) -> float:
        return self.low if self.low == self.high else (self.high - self.low) / math.log(self.high / self.low)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`count` prefixes of `num_tokens` each, one of which begins a prompt, chosen at random."""

    count: int
    num_tokens: int
    share: float = 1.0  # of requests with a prefix


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """Requests of one tenant: `rate` of them a second. `priorities` and `sequences`, numbers of them, are
    each with their shares.
    """

    rate: float
    prompt: Lengths
    output: Lengths
    tenant: str = "default"
    weight: float = 1.0
    process: ArrivalProcess = ArrivalProcess.POISSON
    burst: int = 1
    priorities: tuple[tuple[int, float], ...] = ((0, 1.0),)
    prefixes: Prefixes | None = None
    deadline: float | None = None
    sequences: tuple[tuple[int, float], ...] = ((1, 1.0),)
    max_tokens: int | None = None  # `max_tokens` of every request; by default its output's length

    def arrivals(self, seed: int, num_requests: int | None = None) -> Iterator[Arrival]:
        """The first `num_requests`, or an endless stream."""
        rng = random.Random(f"{seed} {self.tenant}")
        times = _TIMES[self.process](self, random.Random(f"{seed} {self.tenant} times"))
        for _ in count() if num_requests is None else range(num_requests):
            prefix = self._prefix(rng)
            output_tokens = self.output.draw(rng)
            yield Arrival(
                at=next(times),
                prompt_tokens=self.prompt.draw(rng) + (prefix.num_tokens if prefix is not None else 0),
                output_tokens=output_tokens,
                max_tokens=max(output_tokens, self.max_tokens or 0),
                tenant=self.tenant,
                weight=self.weight,
                priority=_choose(self.priorities, rng),
                prefix=prefix,
                deadline=self.deadline,
                n=_choose(self.sequences, rng),
            )

    def _prefix(self, rng: random.Random) -> Prefix | None:
        if self.prefixes is None or rng.random() >= self.prefixes.share:
            return None
        return Prefix(f"{self.tenant} {rng.randrange(self.prefixes.count)}", self.prefixes.num_tokens)


def _choose(shares: Sequence[tuple[int, float]], rng: random.Random) -> int:
    if len(shares) == 1:
        return shares[0][0]
    values, weights = zip(*shares, strict=True)
    return int(rng.choices(values, weights)[0])


def _poisson(stream: ArrivalStream, rng: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.expovariate(stream.rate)
        yield at


def _even(stream: ArrivalStream, rng: random.Random) -> Iterator[float]:
    return (number / stream.rate for number in count())


def _bursts(stream: ArrivalStream, rng: random.Random) -> Iterator[float]:
    at = 0.0
    while True:
        for _ in range(stream.burst):
            yield at
        at += rng.expovariate(stream.rate / stream.burst)


def _at_once(stream: ArrivalStream, rng: random.Random) -> Iterator[float]:
    return (0.0 for _ in count())


_TIMES: dict[ArrivalProcess, Callable[[ArrivalStream, random.Random], Iterator[float]]] = {
    ArrivalProcess.POISSON: _poisson,
    ArrivalProcess.EVEN: _even,
    ArrivalProcess.BURSTS: _bursts,
    ArrivalProcess.AT_ONCE: _at_once,
}
