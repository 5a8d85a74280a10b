"""Applies a fault to an instance of the stack that has running streams."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from tests.chaos.faults import LINKS, Action, Fault, Target
from tests.chaos.histories import History
from tests.chaos.stack import Stack

LiveHistories = Mapping[str, History]
"""Requests that run now, by the names of their clients."""

_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP, Action.TERM: signal.SIGTERM}
_RECEIVED_SECONDS = 1.0
"""For faults of gateways, a stream counts as running if its client received a token in this time."""


@dataclass(frozen=True)
class Hit:
    """What a fault was applied to. `instance` is the role, or that end of the links of which there are several."""

    instance: str
    num_streams: int
    pid: int | None = None
    """The process that received a signal."""
    links: tuple[tuple[str, str], ...] = ()

    @property
    def description(self) -> str:
        """The links or the instance, for a message."""
        ends = sorted({("clients" if caller.startswith("client") else caller, callee) for caller, callee in self.links})
        return ", ".join(f"{caller} to {callee}" for caller, callee in ends) or self.instance


class StackInjector:
    """Chooses an instance, applies a fault to it, and removes the fault."""

    def __init__(self, stack: Stack, live: LiveHistories) -> None:
        self._stack = stack
        self._live = live

    async def begin(self, fault: Fault) -> Hit | None:
        """Applies the fault to an instance with running streams. Returns None, with nothing done, if there is none."""
        leader, num_running = await self._running_streams(fault.target)
        choices = [
            (name, count) for name, count in sorted(num_running.items()) if count and self._stack.is_running(name)
        ]
        if not choices:
            return None
        instance, num_sequences = choices[int(fault.pick * len(choices))]
        # Workers and schedulers count sequences. A stream may have several of them.
        num_streams = min(num_sequences, len(self._live))
        if fault.target not in LINKS:
            return Hit(instance, num_streams, self._stack.send(instance, _SIGNALS[fault.action]))
        links = self._links(fault.target, instance, leader)
        self._stack.set_link_fault(links, fault.link_fault)
        return Hit(instance, num_streams, None, tuple(links))

    async def end(self, fault: Fault, hit: Hit) -> None:
        """Waits for the duration of the fault, then continues the process and clears links without a later fault."""
        await asyncio.sleep(fault.seconds)
        self._stack.clear_link_fault(hit.links, fault.link_fault)
        if fault.action is Action.STOP and hit.pid is not None:
            self._stack.resume(hit.pid)

    async def _running_streams(self, target: Target) -> tuple[str, dict[str, int]]:
        """The leader, or "" if the target does not need it, and the number of running streams by instance."""
        match target:
            case Target.WORKER:
                return "", await self._stack.num_decoding_by_worker()
            case Target.GATEWAY | Target.CLIENT_GATEWAY:
                return "", await self._num_running_by_gateway()
        leader = await self._stack.leader()
        if leader is None:
            return "", {}
        match target:
            case Target.SCHEDULER_WORKER:
                return leader, await self._stack.num_decoding_by_worker()
            case Target.GATEWAY_SCHEDULER:
                return leader, await self._num_running_by_gateway()
        count = int((await self._stack.metrics(leader)).get("quire_sequences_running", 0))
        return leader, {leader if target is Target.SCHEDULER else "redis": count}

    async def _num_running_by_gateway(self) -> dict[str, int]:
        """Streams whose clients received a token from each gateway a moment ago, at most the calls that it reports."""
        names = [name for name in self._stack.instances("gateway") if self._stack.is_running(name)]
        pages = await asyncio.gather(*map(self._stack.metrics, names))
        gateways = [self._stack.last_gateway(client) for client in self._receiving_clients()]
        return {
            name: min(gateways.count(name), int(page.get("quire_gateway_requests_in_flight", 0)))
            for name, page in zip(names, pages, strict=True)
        }

    def _receiving_clients(self) -> list[str]:
        """Clients that received a token in the last `_RECEIVED_SECONDS`."""
        since = monotonic() - _RECEIVED_SECONDS
        return [name for name, history in self._live.items() if history.last_item_at > since]

    def _links(self, target: Target, instance: str, leader: str) -> list[tuple[str, str]]:
        match target:
            case Target.CLIENT_GATEWAY:
                clients = [name for name in self._live if self._stack.last_gateway(name) == instance]
                return self._stack.links(clients, [instance])
            case Target.GATEWAY_SCHEDULER:
                return self._stack.links([instance], [leader])
            case Target.SCHEDULER_WORKER:
                return self._stack.links([leader], [instance])
            case _:
                return self._stack.links([leader], ["redis"])
