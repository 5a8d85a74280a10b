"""Faults one after another: each when streams have gone on after the last, or, early ones, while that still lasts."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from tests.chaos.faults import Fault
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import Hit, Live

GO_ON_SECONDS = 90.0
"""Within which there is someone to hit, and every stream goes on after a fault."""
_AIM_SECONDS = 0.1
_UNDER_WAY_SECONDS = 0.25


class Injects(Protocol):
    """What does faults to something."""

    async def begin(self, fault: Fault) -> Hit | None:
        """Does it to one by whom streams run now; None, and nothing done, where there is none."""
        ...

    async def end(self, fault: Fault, hit: Hit) -> None:
        """Returns when it is over."""
        ...


@dataclass(frozen=True)
class Disturbance:
    """A fault that was begun."""

    fault: Fault
    hit: Hit
    at: float
    num_live: int
    going_on: asyncio.Task[float | None]
    """Seconds until every stream that ran then has gone on; None where one does not."""
    ending: asyncio.Task[None]
    """It lasts as long as the fault."""


class Disturber:
    """Disturbs streams that run."""

    def __init__(self, injector: Injects, live: Live, faults: FaultCount, say: Callable[[str], None]) -> None:
        """`faults` is told of each fault that hit."""
        self.num_faults = 0
        """Those that hit."""
        self.recoveries: list[tuple[Fault, float]] = []
        """Seconds from each fault that no other came upon until every stream that ran had gone on."""
        self._injector = injector
        self._live = live
        self._faults = faults
        self._say = say
        self._started = monotonic()

    async def disturb(self, faults: Iterable[Fault], num_faults: int) -> bool:
        """Draws faults until as many have hit; whether streams went on after each, and there was someone to hit.

        An early one that finds nobody whose streams run does not count, and the next one is drawn. So none comes upon
        an early one: before the next, both are over and all streams have gone on.
        """
        under_way: list[Disturbance] = []
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                is_last = self.num_faults == num_faults
                if is_last or not fault.is_early:
                    if not await self._all_over(under_way):
                        return False
                    under_way = []
                if is_last:
                    break
                hit = await self._hit(fault, under_way[-1].going_on if under_way else None)
                if hit is not None:
                    under_way.append(self._follow(fault, hit, group))
                elif under_way:
                    self._say(f"fault {fault.number:3d}: {fault} found nobody to hit in time, and does not count")
                else:
                    self._say(f"fault {fault.number:3d}: {fault} found nobody to hit in {GO_ON_SECONDS:.0f} s")
                    return False
        return True

    async def _hit(self, fault: Fault, while_not: asyncio.Task[float | None] | None) -> Hit | None:
        """Tries at least once, and then again while this task is not done, for a long time at most."""
        end = monotonic() + GO_ON_SECONDS
        await asyncio.sleep(fault.pause)
        while (hit := await self._injector.begin(fault)) is None and monotonic() < end:
            if while_not is not None and while_not.done():
                break
            await asyncio.sleep(_AIM_SECONDS)
        return hit

    def _follow(self, fault: Fault, hit: Hit, group: asyncio.TaskGroup) -> Disturbance:
        """Counts a fault that has just begun, and sees to what comes of it."""
        now = monotonic()
        self.num_faults += 1
        self._faults.count = fault.number
        before = dict(self._live)
        going_on = group.create_task(_gone_on(before, now))
        ending = group.create_task(self._injector.end(fault, hit))
        return Disturbance(fault, hit, now - self._started, len(before), going_on, ending)

    async def _all_over(self, disturbances: Sequence[Disturbance]) -> bool:
        """Waits until these are over, and whether every stream has gone on; says so."""
        is_alive = True
        for one in disturbances:
            took = await one.going_on
            if took is None:
                told = "not all streams went on"
                is_alive = False
                one.ending.cancel()
            else:
                told = f"all went on after {took:.2f} s"
                if one is disturbances[-1]:
                    self.recoveries.append((one.fault, took))
                else:
                    told += ", while the next one came"
                await one.ending
            self._say(
                f"fault {one.fault.number:3d} at {one.at:7.1f} s: {one.fault}: {one.hit.where}, "
                f"hit {one.hit.num_streams} of {one.num_live} streams, {told}"
            )
        return is_alive


async def _gone_on(before: Mapping[str, History], began: float) -> float | None:
    """Seconds until each of these streams has gained a token or come to its end; None if that takes too long.

    A token that came so soon that it may have been under way at the fault is none that was gained since.
    """
    await asyncio.sleep(_UNDER_WAY_SECONDS)
    waiting = {name: (history, history.num_items) for name, history in before.items()}
    while waiting and monotonic() - began < GO_ON_SECONDS:
        await asyncio.sleep(0.005)
        waiting = {
            name: (history, count)
            for name, (history, count) in waiting.items()
            if not history.is_over and history.num_items == count
        }
    return None if waiting else monotonic() - began
