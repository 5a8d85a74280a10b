"""Which faults come when, and which of them count."""

import asyncio
from collections.abc import Callable

from tests.chaos.disturber import Disturber
from tests.chaos.faults import Action, Fault, Place
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import Hit
from tests.chaos.proxy import Trouble


def fault(number: int, is_early: bool = False) -> Fault:
    return Fault(number, Action.STOP, Place.WORKER, 0.0, Trouble(), 0.0, 0.0, is_early)


class ScriptedInjector:
    """Finds nobody for some faults. A fault ends when its `over` is set."""

    def __init__(self, nobody: set[int], on_begin: Callable[[int], None]) -> None:
        self.events: list[str] = []
        self.over = asyncio.Event()
        self._nobody = nobody
        self._on_begin = on_begin

    async def begin(self, fault: Fault) -> Hit | None:
        if fault.number in self._nobody:
            return None
        self.events.append(f"begin {fault.number}")
        self._on_begin(fault.number)
        return Hit("worker-0", 1)

    async def end(self, fault: Fault, hit: Hit) -> None:
        await self.over.wait()
        self.events.append(f"end {fault.number}")


async def disturb(injector: ScriptedInjector, faults: list[Fault], num_faults: int) -> tuple[Disturber, list[str]]:
    """Over one stream, which gets a token every moment."""
    said: list[str] = []
    history = History("r", "case", FaultCount())

    async def stream() -> None:
        while True:
            history.came(0, None, (1,), "a")
            await asyncio.sleep(0.001)

    streaming = asyncio.create_task(stream())
    disturber = Disturber(injector, {"client-0": history}, history.faults, said.append)
    async with asyncio.timeout(60):
        assert await disturber.disturb(faults, num_faults)
    streaming.cancel()
    return disturber, said


async def test_an_early_one_comes_while_the_one_before_lasts_and_the_next_when_both_are_over() -> None:
    injector = ScriptedInjector(set(), lambda number: injector.over.set() if number == 2 else None)
    disturber, _ = await disturb(injector, [fault(1), fault(2, is_early=True), fault(3), fault(4)], 3)
    assert injector.events[:2] == ["begin 1", "begin 2"]
    assert set(injector.events[2:4]) == {"end 1", "end 2"}
    assert injector.events[4:] == ["begin 3", "end 3"]
    # What was hit twice has no time of its own.
    assert [each.number for each, _ in disturber.recoveries] == [2, 3]


async def test_an_early_one_that_finds_nobody_does_not_count_and_another_one_is_drawn() -> None:
    injector = ScriptedInjector({2}, lambda number: None)
    injector.over.set()
    disturber, said = await disturb(injector, [fault(1), fault(2, is_early=True), fault(3), fault(4), fault(5)], 3)
    assert [event for event in injector.events if event.startswith("begin")] == ["begin 1", "begin 3", "begin 4"]
    assert disturber.num_faults == 3
    assert any("fault   2" in line and "does not count" in line for line in said)
