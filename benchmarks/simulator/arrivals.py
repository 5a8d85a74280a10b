"""What arrives, and when: requests as they are before their tokens are made, and where they come from."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that prompts share: of all with the same name, the longer ones begin with the shorter ones."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `at` is in seconds; `deadline` in seconds after it.

    The prompt is `prompt`, or else `prompt_tokens` tokens, of which the first are the prefix's and the others like no
    other request's. It ends after `output_tokens`, by a stop token where `max_tokens` asks for more.
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


class Traffic(Protocol):
    """Requests in the order in which they arrive."""

    def first(self) -> Iterable[Arrival]:
        """Those that are known before anything has happened."""

    def after_arrival(self) -> Arrival | None:
        """The next one, known once one has arrived."""

    def after_end(self, now: float) -> Arrival | None:
        """The next one, known once one has ended or was refused."""


class OpenLoop:
    """Requests that arrive when they arrive. They must be in order."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = iter(arrivals)

    def first(self) -> Iterable[Arrival]:
        """The first, if there is any."""
        return [arrival for arrival in (next(self._arrivals, None),) if arrival is not None]

    def after_arrival(self) -> Arrival | None:
        """The one after that which arrived last."""
        return next(self._arrivals, None)

    def after_end(self, now: float) -> Arrival | None:
        """Nothing: nobody waits for an answer."""
        return None


class ClosedLoop:
    """Clients each of which sends its next request `think_seconds` after its last one's end."""

    def __init__(self, arrivals: Iterable[Arrival], num_clients: int, think_seconds: float = 0.0) -> None:
        self._arrivals = iter(arrivals)
        self._num_clients = num_clients
        self._think_seconds = think_seconds

    def first(self) -> Iterable[Arrival]:
        """One for each client, at the start."""
        first = (self._next(0.0) for _ in range(self._num_clients))
        return [arrival for arrival in first if arrival is not None]

    def after_arrival(self) -> Arrival | None:
        """Nothing: a client sends one at a time."""
        return None

    def after_end(self, now: float) -> Arrival | None:
        """The client's next one."""
        return self._next(now + self._think_seconds)

    def _next(self, at: float) -> Arrival | None:
        arrival = next(self._arrivals, None)
        return None if arrival is None else replace(arrival, at=at)


def merged(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Several streams that are each in order, as one."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at)
