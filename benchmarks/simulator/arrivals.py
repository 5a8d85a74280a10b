"""Arrivals of requests: their times, lengths and classes, without tokens."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prefix:
    """A shared prefix of prompts: of those with the same name, longer ones begin with the shorter ones."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of `n` sequences. `at` is in seconds; `deadline` in seconds after it.

    The prompt is `prompt`, or else `prompt_tokens` tokens, of which the first are the prefix's and the others unique.
    It ends after `output_tokens`, by a stop token where `max_tokens` is larger.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    prefix: Prefix | None = None
    prompt: tuple[int, ...] | None = None
    deadline: float | None = None
    n: int = 1


class Traffic(Protocol):
    """Requests in the order in which they arrive."""

    def first(self) -> Iterable[Arrival]:
        """The requests that are known at the start."""

    def after_arrival(self) -> Arrival | None:
        """The next request, known once one has arrived."""

    def after_end(self, now: float) -> Arrival | None:
        """The next request, known once one has ended or was rejected."""


class OpenLoop:
    """Requests at given times, in order."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = iter(arrivals)

    def first(self) -> Iterable[Arrival]:
        return [arrival for arrival in (next(self._arrivals, None),) if arrival is not None]

    def after_arrival(self) -> Arrival | None:
        return next(self._arrivals, None)

    def after_end(self, now: float) -> Arrival | None:
        """Nothing: arrivals do not depend on ends."""
        return None


class ClosedLoop:
    """Clients each of which sends its next request `think_seconds` after its last one's end."""

    def __init__(self, arrivals: Iterable[Arrival], num_clients: int, think_seconds: float = 0.0) -> None:
        self._arrivals = iter(arrivals)
        self._num_clients = num_clients
        self._think_seconds = think_seconds

    def first(self) -> Iterable[Arrival]:
        first = (self._next(0.0) for _ in range(self._num_clients))
        return [arrival for arrival in first if arrival is not None]

    def after_arrival(self) -> Arrival | None:
        return None

    def after_end(self, now: float) -> Arrival | None:
        return self._next(now + self._think_seconds)

    def _next(self, at: float) -> Arrival | None:
        arrival = next(self._arrivals, None)
        return None if arrival is None else replace(arrival, at=at)


def merged(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Several streams that are each in order, as one."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at)
