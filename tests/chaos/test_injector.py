"""A fault hits one by whom streams run at that moment, or nobody."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

import pytest

from tests.chaos.faults import Action, Fault, Place
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import Injector
from tests.chaos.proxy import Trouble
from tests.chaos.stack import Stack


@dataclass
class ScriptedStack:
    """One of each role, or two, and no process behind them."""

    serving: str | None = "scheduler-1"
    decoding: dict[str, int] = field(default_factory=dict)
    pages: dict[str, dict[str, float]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    heard: dict[str, str] = field(default_factory=dict)
    done: list[tuple[object, ...]] = field(default_factory=list)

    def instances(self, role: str) -> list[str]:
        return [f"{role}-0", f"{role}-1"]

    def is_running(self, name: str) -> bool:
        return name not in self.stopped

    def gateway_of(self, client: str) -> str | None:
        return self.heard.get(client)

    async def leader(self) -> str | None:
        return self.serving

    async def metrics(self, name: str) -> dict[str, float]:
        return self.pages.get(name, {})

    async def running_at_workers(self) -> dict[str, int]:
        return self.decoding

    def links(self, callers: Iterable[str], callees: Iterable[str]) -> list[tuple[str, str]]:
        return [(caller, callee) for caller in callers for callee in callees]

    def send(self, name: str, number: signal.Signals) -> int:
        self.done.append((name, number))
        return 17

    def resume(self, pid: int) -> None:
        self.done.append(("resume", pid))

    def trouble(self, links: Iterable[tuple[str, str]], trouble: Trouble) -> None:
        self.done.append((*links, trouble))

    def mend(self, links: Iterable[tuple[str, str]], trouble: Trouble) -> None:
        if links:
            self.done.append(("mend", *links, trouble))


def live(*fed_at: float) -> dict[str, History]:
    """Streams of client-0 and so on, by when something of them came last."""
    histories = {}
    for i, at in enumerate(fed_at):
        histories[f"client-{i}"] = History(f"r{i}", "case", FaultCount(), fed_at=at)
    return histories


def fault(action: Action, place: Place, pick: float = 0.0) -> Fault:
    return Fault(1, action, place, 0.0, Trouble(is_truncated=action is Action.CUT), pick, 0.0, is_early=True)


def injector(stack: ScriptedStack, streams: dict[str, History]) -> Injector:
    return Injector(cast(Stack, stack), streams)


@pytest.mark.parametrize("place", Place)
async def test_where_no_stream_runs_nothing_is_done(place: Place) -> None:
    stack = ScriptedStack(decoding={"worker-0": 0, "worker-1": 0}, heard={"client-0": "gateway-0"})
    action = Action.CUT if "-" in place else Action.KILL
    assert await injector(stack, live(monotonic())).begin(fault(action, place)) is None
    assert not stack.done


async def test_of_workers_one_that_decodes_is_hit() -> None:
    stack = ScriptedStack(decoding={"worker-0": 0, "worker-1": 3})
    hit = await injector(stack, live(0, 0, 0, 0)).begin(fault(Action.KILL, Place.WORKER))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("worker-1", 3)
    assert stack.done == [("worker-1", signal.SIGKILL)]


async def test_one_that_ended_or_was_stopped_meanwhile_is_not_hit() -> None:
    stack = ScriptedStack(decoding={"worker-0": 2, "worker-1": 2}, stopped={"worker-0"})
    hit = await injector(stack, live(0, 0)).begin(fault(Action.TERM, Place.WORKER))
    assert hit is not None
    assert hit.instance == "worker-1"


async def test_a_scheduler_is_hit_while_requests_run_there() -> None:
    stack = ScriptedStack(pages={"scheduler-1": {"quire_requests_running": 2.0}})
    hit = await injector(stack, live(0, 0, 0)).begin(fault(Action.KILL, Place.SCHEDULER))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("scheduler-1", 2)
    stack.serving = None
    assert await injector(stack, live(0, 0, 0)).begin(fault(Action.KILL, Place.SCHEDULER)) is None


async def test_at_a_gateway_streams_count_that_it_runs_and_that_clients_just_heard_of() -> None:
    calls = {"quire_gateway_requests_in_flight": 5.0}
    clients = {f"client-{i}": f"gateway-{i % 2}" for i in range(4)}
    stack = ScriptedStack(pages={"gateway-0": calls}, heard=clients)  # gateway-1 was started again: it has no calls
    now = monotonic() + 600  # heard of just now, however long this test takes
    hit = await injector(stack, live(now, now, now - 1200, now)).begin(fault(Action.CUT, Place.CLIENT_GATEWAY, 0.9))
    assert hit is not None
    assert (hit.instance, hit.num_streams) == ("gateway-0", 1)
    assert set(hit.links) == {("client-0", "gateway-0"), ("client-2", "gateway-0")}


async def test_the_process_that_was_stopped_goes_on_and_links_are_mended_of_their_own_trouble() -> None:
    pages = {"scheduler-1": {"quire_requests_running": 1.0}}
    stack = ScriptedStack(pages=pages)
    injecting = injector(stack, live(0))
    stop, cut = fault(Action.STOP, Place.SCHEDULER), fault(Action.CUT, Place.SCHEDULER_REDIS)
    for each in (stop, cut):
        hit = await injecting.begin(each)
        assert hit is not None
        await injecting.end(each, hit)
    link = ("scheduler-1", "redis")
    assert stack.done == [
        ("scheduler-1", signal.SIGSTOP),
        ("resume", 17),
        (link, cut.trouble),
        ("mend", link, cut.trouble),
    ]
