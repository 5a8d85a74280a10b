"""Does to a stack what a fault says, where it hits streams that run."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.faults import LINKS, Action, Fault, Place
from tests.chaos.histories import History
from tests.chaos.proxy import WHOLE
from tests.chaos.stack import Stack

Live = Mapping[str, History]
"""Requests that run now, by the names of their clients."""

_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP, Action.TERM: signal.SIGTERM}
_PROCESS_SECONDS = 30.0
_SAMPLE_SECONDS = 0.4


@dataclass(frozen=True)
class Hit:
    """What a fault was done to. `instance` is the role, or the one of a link's two ends that there are several of."""

    instance: str
    num_streams: int
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

    async def aim(self, fault: Fault, last: Hit | None) -> Hit | None:
        """Whom it would hit now, the same as `last` where it is early; None where it would hit no stream that runs."""
        leader = await self._stack.leader()
        if fault.is_early and last is not None:
            # Nobody may serve just now: that is when it is to come.
            return last
        if leader is None:
            return None
        match fault.place:
            case Place.SCHEDULER | Place.REDIS | Place.SCHEDULER_REDIS:
                instance = leader if fault.place is Place.SCHEDULER else "redis"
                reached = {instance: len(self._live)}
            case Place.WORKER | Place.SCHEDULER_WORKER:
                reached = await self._running_at_workers()
            case _:
                reached = self._connected_to_gateways()
        choices = [(name, count) for name, count in sorted(reached.items()) if count]
        if not choices:
            return None
        instance, num_streams = choices[int(fault.pick * len(choices))]
        links = self._links(fault.place, instance, leader) if fault.place in LINKS else []
        # A stream of several sequences counts once, as far as that can be told.
        return Hit(instance, min(num_streams, len(self._live)), tuple(links))

    async def inject(self, fault: Fault, hit: Hit) -> None:
        """Does it, and returns when it is over: a process that was stopped goes on, links are whole."""
        if fault.place in LINKS:
            self._stack.trouble(hit.links, fault.trouble)
            await asyncio.sleep(fault.seconds)
            self._stack.trouble(hit.links, WHOLE)
            return
        async with asyncio.timeout(_PROCESS_SECONDS):
            # After an early one the supervisor may be about to start it again.
            while (pid := self._stack.send(hit.instance, _SIGNALS[fault.action])) is None:
                await asyncio.sleep(0.01)
        if fault.action is Action.STOP:
            await asyncio.sleep(fault.seconds)
            self._stack.resume(pid)

    def _connected_to_gateways(self) -> dict[str, int]:
        gateways = [self._stack.gateway_of(client) for client in self._live]
        return {name: gateways.count(name) for name in self._stack.instances("gateway")}

    async def _running_at_workers(self) -> dict[str, int]:
        """Sequences in an average step of each worker, over a moment."""
        names = self._stack.instances("worker")
        before = await asyncio.gather(*map(self._stack.metrics, names))
        await asyncio.sleep(_SAMPLE_SECONDS)
        after = await asyncio.gather(*map(self._stack.metrics, names))
        steps, decodes = "quire_worker_steps_total", 'quire_worker_tokens_total{kind="decode"}'
        found = {}
        for name, old, new in zip(names, before, after, strict=True):
            num_steps, num_decodes = (new.get(sample, 0) - old.get(sample, 0) for sample in (steps, decodes))
            found[name] = round(num_decodes / num_steps) if num_steps > 0 else 0
        return found

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
