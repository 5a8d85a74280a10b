"""Injects faults one after another. A fault waits until all streams have recovered from the previous one, unless it is
an overlapping fault."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from tests.chaos.faults import Fault
from tests.chaos.histories import FaultCount, History
from tests.chaos.injector import Hit, LiveHistories

RECOVERY_SECONDS = 90.0
"""Timeout for every stream to recover from a fault, and for a fault to find an instance with running streams."""
_RETRY_SECONDS = 0.1
_IN_FLIGHT_SECONDS = 0.25
_RECEIVING_SECONDS = 1.0


class FaultInjector(Protocol):
    """Applies a fault and removes it."""

    async def begin(self, fault: Fault) -> Hit | None:
        """Applies the fault to an instance with running streams. Returns None, with nothing done, if there is none."""
        ...

    async def end(self, fault: Fault, hit: Hit) -> None:
        """Waits for the duration of the fault and removes it."""
        ...


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault until all streams that received tokens before it have received another one, or ended.

    `pause` is the time until half as many streams have, these or others: which of them has a slot is up to the policy.
    """

    seconds: float
    pause: float


@dataclass(frozen=True)
class ActiveFault:
    """A fault that was injected."""

    fault: Fault
    hit: Hit
    at: float
    """Seconds since the start of the run."""
    num_receiving: int
    """Streams that received tokens until the fault was injected."""
    recovery: asyncio.Task[Recovery | None]
    """What it took; None after a timeout."""
    end: asyncio.Task[None]
    """Done when the fault is removed."""


class FaultRunner:
    """Injects faults while streams run, and measures the recovery."""

    def __init__(
        self, injector: FaultInjector, live: LiveHistories, faults: FaultCount, print_line: Callable[[str], None]
    ) -> None:
        """`faults` is set to the number of each injected fault."""
        self.num_faults = 0
        """Injected faults."""
        self.recoveries: list[tuple[Fault, Recovery]] = []
        """Of faults that no other fault overlapped."""
        self._injector = injector
        self._live = live
        self._faults = faults
        self._print_line = print_line
        self._started = monotonic()

    async def run(self, faults: Iterable[Fault], num_faults: int) -> bool:
        """Injects `num_faults` faults. Returns False if streams do not recover, or a fault finds no running stream.

        An overlapping fault that finds no running stream is skipped and not counted.
        """
        active: list[ActiveFault] = []
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                is_last = self.num_faults == num_faults
                if is_last or not fault.is_overlapping:
                    if not await self._all_recovered(active):
                        return False
                    active = []
                if is_last:
                    break
                hit = await self._hit(fault, active[-1].recovery if active else None)
                if hit is not None:
                    active.append(self._follow(fault, hit, group))
                elif active:
                    self._print_line(f"fault {fault.number:3d}: {fault}: skipped, no running stream in time")
                else:
                    self._print_line(f"fault {fault.number:3d}: {fault}: no running stream in {RECOVERY_SECONDS:.0f} s")
                    return False
        return True

    async def _hit(self, fault: Fault, previous: asyncio.Task[Any] | None) -> Hit | None:
        """Tries to inject a fault, at least once, until the timeout or until the recovery from the previous one."""
        end = monotonic() + RECOVERY_SECONDS
        await asyncio.sleep(fault.pause)
        while (hit := await self._injector.begin(fault)) is None and monotonic() < end:
            if previous is not None and previous.done():
                break
            await asyncio.sleep(_RETRY_SECONDS)
        return hit

    def _follow(self, fault: Fault, hit: Hit, group: asyncio.TaskGroup) -> ActiveFault:
        """Counts an injected fault, and starts the tasks that wait for its recovery and its end."""
        now = monotonic()
        self.num_faults += 1
        self._faults.count = fault.number
        # Others wait for a slot, or for blocks, and may wait for long.
        before = {
            name: history for name, history in self._live.items() if history.last_item_at > now - _RECEIVING_SECONDS
        }
        recovery = group.create_task(_recovery_time(before, self._live, now))
        end = group.create_task(self._injector.end(fault, hit))
        return ActiveFault(fault, hit, now - self._started, len(before), recovery, end)

    async def _all_recovered(self, active: Sequence[ActiveFault]) -> bool:
        """Waits for the recovery from these faults and prints it. Returns False after a timeout."""
        all_recovered = True
        for one in active:
            recovered = await one.recovery
            if recovered is None:
                result = "not all streams recovered"
                all_recovered = False
                one.end.cancel()
            else:
                result = f"all recovered after {recovered.seconds:.2f} s"
                if one is active[-1]:
                    self.recoveries.append((one.fault, recovered))
                else:
                    result += ", overlapped by the next fault"
                await one.end
            self._print_line(
                f"fault {one.fault.number:3d} at {one.at:7.1f} s: {one.fault}: {one.hit.description}, "
                f"hit {one.hit.num_streams} streams; of {one.num_receiving} that received tokens, {result}"
            )
        return all_recovered


async def _recovery_time(before: Mapping[str, History], live: LiveHistories, began: float) -> Recovery | None:
    """What it took until each of the streams `before` has received a token or ended; None after a timeout.

    Tokens of the first 0.25 s do not count: they may have been in flight at the time of the fault.
    """
    await asyncio.sleep(_IN_FLIGHT_SECONDS)
    since = monotonic()
    waiting = {name: (history, history.num_items) for name, history in before.items()}
    served: set[str] = set()  # requests
    pause = 0.0
    while waiting and monotonic() - began < RECOVERY_SECONDS:
        await asyncio.sleep(0.005)
        served |= {history.name for history, count in waiting.values() if history.is_done or history.num_items > count}
        served |= {history.name for history in live.values() if history.last_item_at > since}
        waiting = {name: each for name, each in waiting.items() if each[0].name not in served}
        if len(served) < len(before) / 2:
            pause = monotonic() - began
    return None if waiting else Recovery(monotonic() - began, pause)
