"""Does to a stack what a fault says, where it hits streams that run."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from tests.chaos.faults import LINKS, Action, Fault, Place
from tests.chaos.histories import History
from tests.chaos.stack import Stack

Live = Mapping[str, History]
"""Requests that run now, by the names of their clients."""

_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP, Action.TERM: signal.SIGTERM}
_RUNNING_SECONDS = 1.0
"""A stream that its client got nothing of for so long does not run just now, as far as gateways are concerned."""


@dataclass(frozen=True)
class Hit:
    """What a fault was done to. `instance` is the role, or the one of a link's two ends that there are several of."""

    instance: str
    num_streams: int
    pid: int | None = None
    """The process that got a signal."""
    links: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        """In words."""
        ends = sorted({("clients" if caller.startswith("client") else caller, callee) for caller, callee in self.links})
        return ", ".join(f"{caller} to {callee}" for caller, callee in ends) or self.instance


class Injector:
    """Finds whom a fault hits, and does it."""

    def __init__(self, stack: Stack, live: Live) -> None:
        self._stack = stack
        self._live = live

    async def begin(self, fault: Fault) -> Hit | None:
        """Does it to one by whom streams run now; None, and nothing done, where there is none."""
        leader, reached = await self._running(fault.place)
        choices = [(name, count) for name, count in sorted(reached.items()) if count and self._stack.is_running(name)]
        if not choices:
            return None
        instance, num_sequences = choices[int(fault.pick * len(choices))]
        # A stream of several sequences counts once, as far as that can be told.
        num_streams = min(num_sequences, len(self._live))
        if fault.place not in LINKS:
            return Hit(instance, num_streams, self._stack.send(instance, _SIGNALS[fault.action]))
        links = self._links(fault.place, instance, leader)
        self._stack.trouble(links, fault.trouble)
        return Hit(instance, num_streams, None, tuple(links))

    async def end(self, fault: Fault, hit: Hit) -> None:
        """Returns when it is over: a process that was stopped goes on, and links are whole, but for later troubles."""
        await asyncio.sleep(fault.seconds)
        self._stack.mend(hit.links, fault.trouble)
        if fault.action is Action.STOP and hit.pid is not None:
            self._stack.resume(hit.pid)

    async def _running(self, place: Place) -> tuple[str, dict[str, int]]:
        """The leader, or "" where it does not matter, and the streams that run by each instance of a place."""
        match place:
            case Place.WORKER:
                return "", await self._stack.running_at_workers()
            case Place.GATEWAY | Place.CLIENT_GATEWAY:
                return "", await self._running_at_gateways()
        leader = await self._stack.leader()
        if leader is None:
            return "", {}
        match place:
            case Place.SCHEDULER_WORKER:
                return leader, await self._stack.running_at_workers()
            case Place.GATEWAY_SCHEDULER:
                return leader, await self._running_at_gateways()
        num_running = int((await self._stack.metrics(leader)).get("quire_requests_running", 0))
        return leader, {leader if place is Place.SCHEDULER else "redis": num_running}

    async def _running_at_gateways(self) -> dict[str, int]:
        """Streams whose clients heard from a gateway last, and just now, as far as it knows of so many calls itself."""
        names = [name for name in self._stack.instances("gateway") if self._stack.is_running(name)]
        pages = await asyncio.gather(*map(self._stack.metrics, names))
        gateways = [self._stack.gateway_of(client) for client in self._fed()]
        return {
            name: min(gateways.count(name), int(page.get("quire_gateway_requests_in_flight", 0)))
            for name, page in zip(names, pages, strict=True)
        }

    def _fed(self) -> list[str]:
        """Clients who got something of their stream just now."""
        since = monotonic() - _RUNNING_SECONDS
        return [name for name, history in self._live.items() if history.fed_at > since]

    def _links(self, place: Place, instance: str, leader: str) -> list[tuple[str, str]]:
        match place:
            case Place.CLIENT_GATEWAY:
                clients = [name for name in self._live if self._stack.gateway_of(name) == instance]
                return self._stack.links(clients, [instance])
            case Place.GATEWAY_SCHEDULER:
                return self._stack.links([instance], [leader])
            case Place.SCHEDULER_WORKER:
                return self._stack.links([leader], [instance])
            case _:
                return self._stack.links([leader], ["redis"])
