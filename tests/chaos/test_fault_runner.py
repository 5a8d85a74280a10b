"""When faults are injected, and which of them count."""

import asyncio
from collections.abc import Callable

from tests.chaos.fault_runner import FaultRunner
from tests.chaos.faults import Action, Fault, Target
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import Hit
from tests.chaos.proxy import LinkFault


def fault(number: int, is_overlapping: bool = False) -> Fault:
    return Fault(number, Action.STOP, Target.WORKER, 0.0, LinkFault(), 0.0, 0.0, is_overlapping)


class ScriptedInjector:
    """Finds no running stream for the faults `without_target`. All faults end when `ended` is set."""

    def __init__(self, without_target: set[int], on_begin: Callable[[int], None]) -> None:
        self.events: list[str] = []
        self.ended = asyncio.Event()
        self._without_target = without_target
        self._on_begin = on_begin

    async def begin(self, fault: Fault) -> Hit | None:
        if fault.number in self._without_target:
            return None
        self.events.append(f"begin {fault.number}")
        self._on_begin(fault.number)
        return Hit("worker-0", 1)

    async def end(self, fault: Fault, hit: Hit) -> None:
        await self.ended.wait()
        self.events.append(f"end {fault.number}")


async def run_faults(injector: ScriptedInjector, faults: list[Fault], num_faults: int) -> tuple[FaultRunner, list[str]]:
    """Runs faults while one stream receives a token every millisecond."""
    lines: list[str] = []
    history = History("r", "case", FaultCount())

    async def stream() -> None:
        while True:
            history.add_chunk(0, None, (1,), "a")
            await asyncio.sleep(0.001)

    streaming = asyncio.create_task(stream())
    fault_runner = FaultRunner(injector, {"client-0": history}, history.faults, lines.append)
    async with asyncio.timeout(60):
        assert await fault_runner.run(faults, num_faults)
    streaming.cancel()
    return fault_runner, lines


async def test_an_overlapping_fault_does_not_wait_and_the_next_fault_waits_for_both() -> None:
    injector = ScriptedInjector(set(), lambda number: injector.ended.set() if number == 2 else None)
    fault_runner, _ = await run_faults(injector, [fault(1), fault(2, is_overlapping=True), fault(3), fault(4)], 3)
    assert injector.events[:2] == ["begin 1", "begin 2"]
    assert set(injector.events[2:4]) == {"end 1", "end 2"}
    assert injector.events[4:] == ["begin 3", "end 3"]
    # A fault that was overlapped has no recovery time.
    assert [each.number for each, _ in fault_runner.recoveries] == [2, 3]


async def test_an_overlapping_fault_without_running_streams_is_skipped_and_not_counted() -> None:
    injector = ScriptedInjector({2}, lambda number: None)
    injector.ended.set()
    fault_runner, lines = await run_faults(
        injector, [fault(1), fault(2, is_overlapping=True), fault(3), fault(4), fault(5)], 3
    )
    assert [event for event in injector.events if event.startswith("begin")] == ["begin 1", "begin 3", "begin 4"]
    assert fault_runner.num_faults == 3
    assert any("fault   2" in line and "skipped" in line for line in lines)


async def test_a_pause_ends_when_half_as_many_streams_receive_tokens() -> None:
    """Two of four streams lose their slots to two others, and come back at the end."""
    faults = FaultCount()
    live = {f"client-{i}": History(f"r{i}", "case", faults) for i in range(6)}
    streams = list(live.values())
    continues, ends = asyncio.Event(), asyncio.Event()

    async def stream(history: History, *, is_before: bool, is_after: bool) -> None:
        while True:
            if ends.is_set() or (is_after if continues.is_set() else is_before and not faults.count):
                history.add_chunk(0, None, (1,), "a")
            await asyncio.sleep(0.001)

    async def later() -> None:
        while not faults.count:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        continues.set()
        await asyncio.sleep(0.5)
        ends.set()

    tasks = [asyncio.create_task(stream(each, is_before=i < 4, is_after=i >= 4)) for i, each in enumerate(streams)]
    tasks.append(asyncio.create_task(later()))
    await asyncio.sleep(0.01)
    injector = ScriptedInjector(set(), lambda number: None)
    injector.ended.set()
    fault_runner = FaultRunner(injector, live, faults, lambda line: None)
    async with asyncio.timeout(60):
        assert await fault_runner.run([fault(1), fault(2)], 1)
    for task in tasks:
        task.cancel()
    [(_, recovery)] = fault_runner.recoveries
    assert 0.4 <= recovery.pause < recovery.seconds  # up to the last look before
    assert recovery.seconds >= 1.0
