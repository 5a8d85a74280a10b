"""A fault is applied to an instance with running streams, or not at all."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

import pytest

from tests.chaos.faults import Action, Fault, Target
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import StackInjector
from tests.chaos.proxy import LinkFault
from tests.chaos.stack import Stack


@dataclass
class ScriptedStack:
    """Two instances of each role, without processes."""

    serving: str | None = "scheduler-1"
    decoding: dict[str, int] = field(default_factory=dict)
    pages: dict[str, dict[str, float]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    gateways: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def instances(self, role: str) -> list[str]:
        return [f"{role}-0", f"{role}-1"]

    def is_running(self, name: str) -> bool:
        return name not in self.stopped

    def last_gateway(self, client: str) -> str | None:
        return self.gateways.get(client)

    async def leader(self) -> str | None:
        return self.serving

    async def metrics(self, name: str) -> dict[str, float]:
        return self.pages.get(name, {})

    async def num_decoding_by_worker(self) -> dict[str, int]:
        return self.decoding

    def links(self, callers: Iterable[str], callees: Iterable[str]) -> list[tuple[str, str]]:
        return [(caller, callee) for caller in callers for callee in callees]

    def send(self, name: str, number: signal.Signals) -> int:
        self.calls.append((name, number))
        return 17

    def resume(self, pid: int) -> None:
        self.calls.append(("resume", pid))

    def set_link_fault(self, links: Iterable[tuple[str, str]], fault: LinkFault) -> None:
        self.calls.append((*links, fault))

    def clear_link_fault(self, links: Iterable[tuple[str, str]], fault: LinkFault) -> None:
        if links:
            self.calls.append(("clear_link_fault", *links, fault))


def live(*last_item_at: float) -> dict[str, History]:
    """Histories of client-0, client-1 and so on; each argument is the time of the last item."""
    histories = {}
    for i, at in enumerate(last_item_at):
        histories[f"client-{i}"] = History(f"r{i}", "case", FaultCount(), last_item_at=at)
    return histories


def fault(action: Action, target: Target, pick: float = 0.0) -> Fault:
    return Fault(1, action, target, 0.0, LinkFault(is_reset=action is Action.RESET), pick, 0.0, is_overlapping=True)


def injector(stack: ScriptedStack, streams: dict[str, History]) -> StackInjector:
    return StackInjector(cast(Stack, stack), streams)


@pytest.mark.parametrize("target", Target)
async def test_without_running_streams_nothing_is_done(target: Target) -> None:
    stack = ScriptedStack(decoding={"worker-0": 0, "worker-1": 0}, gateways={"client-0": "gateway-0"})
    action = Action.RESET if "-" in target else Action.KILL
    assert await injector(stack, live(monotonic())).begin(fault(action, target)) is None
    assert not stack.calls


async def test_a_worker_that_decodes_is_hit() -> None:
    stack = ScriptedStack(decoding={"worker-0": 0, "worker-1": 3})
    hit = await injector(stack, live(0, 0, 0, 0)).begin(fault(Action.KILL, Target.WORKER))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("worker-1", 3)
    assert stack.calls == [("worker-1", signal.SIGKILL)]


async def test_a_stopped_worker_is_not_hit() -> None:
    stack = ScriptedStack(decoding={"worker-0": 2, "worker-1": 2}, stopped={"worker-0"})
    hit = await injector(stack, live(0, 0)).begin(fault(Action.TERM, Target.WORKER))
    assert hit is not None
    assert hit.instance == "worker-1"


async def test_a_scheduler_is_hit_while_requests_run_there() -> None:
    stack = ScriptedStack(pages={"scheduler-1": {"quire_sequences_running": 2.0}})
    hit = await injector(stack, live(0, 0, 0)).begin(fault(Action.KILL, Target.SCHEDULER))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("scheduler-1", 2)
    stack.serving = None
    assert await injector(stack, live(0, 0, 0)).begin(fault(Action.KILL, Target.SCHEDULER)) is None


async def test_streams_of_a_gateway_are_those_that_it_reports_and_that_received_tokens_lately() -> None:
    in_flight = {"quire_gateway_requests_in_flight": 5.0}
    clients = {f"client-{i}": f"gateway-{i % 2}" for i in range(4)}
    stack = ScriptedStack(pages={"gateway-0": in_flight}, gateways=clients)  # gateway-1 has restarted: it has no calls
    now = monotonic() + 600  # still recent if this test is slow
    hit = await injector(stack, live(now, now, now - 1200, now)).begin(fault(Action.RESET, Target.CLIENT_GATEWAY, 0.9))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("gateway-0", 1)
    assert set(hit.links) == {("client-0", "gateway-0"), ("client-2", "gateway-0")}


async def test_a_stopped_process_is_continued_and_links_are_cleared_of_their_own_fault() -> None:
    pages = {"scheduler-1": {"quire_sequences_running": 1.0}}
    stack = ScriptedStack(pages=pages)
    injecting = injector(stack, live(0))
    stop, reset = fault(Action.STOP, Target.SCHEDULER), fault(Action.RESET, Target.SCHEDULER_REDIS)
    for each in (stop, reset):
        hit = await injecting.begin(each)
        assert hit is not None
        await injecting.end(each, hit)
    link = ("scheduler-1", "redis")
    assert stack.calls == [
        ("scheduler-1", signal.SIGSTOP),
        ("resume", 17),
        (link, reset.link_fault),
        ("clear_link_fault", link, reset.link_fault),
    ]
