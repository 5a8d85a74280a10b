"""Measures the memory of the container or machine, and reports when it is short, before the kernel kills a process."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from worker_svc.host_memory import HostMemory, HostMemoryReader
from worker_svc.metrics import set_memory, set_memory_parts

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from worker_svc.memory_parts import MemoryParts

logger = logging.getLogger("quire.worker")

_PERIOD = 0.1  # seconds between measurements, which take a fraction of a millisecond
_PARTS_EVERY = 20  # measurements: the parts take milliseconds for GiB of blocks
_MARGIN = 0.02  # of the limit: how far a state's end is below its beginning


class MemoryPressure(Enum):
    """How short memory is. The scheduler acts on it."""

    NONE = "none"
    HIGH = "high"
    """Nothing may make it grow."""
    CRITICAL = "critical"
    """It must shrink."""


@dataclass(frozen=True, slots=True)
class PressureLevels:
    """The shares of the limit from which on memory is short. A state ends a little below the share at which it begins,
    so that it does not change with every step.
    """

    high: float
    critical: float

    def next(self, before: MemoryPressure, share: float) -> MemoryPressure:
        """The state after a measurement."""
        is_critical = before is MemoryPressure.CRITICAL
        if share >= self.critical - _MARGIN * is_critical:
            return MemoryPressure.CRITICAL
        is_high = before is not MemoryPressure.NONE
        return MemoryPressure.HIGH if share >= self.high - _MARGIN * is_high else MemoryPressure.NONE


class MemoryMonitor:
    """Measures memory on a thread of its own, until it is closed. Any thread may read the last measurement."""

    def __init__(self, reader: HostMemoryReader, levels: PressureLevels, period: float = _PERIOD) -> None:
        self._reader, self._levels = reader, levels
        self._read_parts: Callable[[], MemoryParts] | None = None
        self._num_measured = 0
        self._lock = threading.Lock()  # guards what is below
        self._pressure = MemoryPressure.NONE
        self._is_unreported = False
        self.host = reader.read()
        """The last measurement."""
        self.parts: MemoryParts | None = None
        """The last one of what the worker's memory holds; None before the model is loaded."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(period,), name="memory", daemon=True)
        self._thread.start()

    @property
    def pressure(self) -> MemoryPressure:
        """The state after the last measurement."""
        return self._pressure

    def take_pressure(self) -> MemoryPressure | None:
        """The state if it was measured since the last call, and memory is or was short; else None."""
        with self._lock:
            is_unreported, self._is_unreported = self._is_unreported, False
            return self._pressure if is_unreported else None

    def watch_parts(self, read: "Callable[[], MemoryParts] | None") -> None:
        """The model is loaded: `read` measures what its memory holds. None: it is dropped."""
        self._read_parts = read
        self._num_measured = 0

    def measure(self) -> None:
        """Measures now."""
        host = self._reader.read()
        with self._lock:
            before, self.host = self._pressure, host
            self._pressure = self._levels.next(before, host.share)
            is_short = self._pressure is not MemoryPressure.NONE
            self._is_unreported |= is_short or before is not MemoryPressure.NONE
        set_memory(host, list(MemoryPressure).index(self._pressure))
        if self._pressure is not before:
            _log(before, self._pressure, host)
        if self._read_parts is not None and self._num_measured % _PARTS_EVERY == 0:
            self.parts = self._read_parts()
            set_memory_parts(self.parts)
        self._num_measured += 1

    def describe(self) -> dict[str, object]:
        """The last measurement, for `/health`."""
        host = self.host
        described: dict[str, object] = {
            "pressure": self._pressure.value,
            "host": {"used_bytes": host.used, "limit_bytes": host.limit, "limited_by": host.source},
        }
        if self.parts is not None:
            described |= self.parts.describe()
        return described

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self, period: float) -> None:
        while not self._closed.wait(period):
            try:
                self.measure()
            except Exception:
                # A file that cannot be read now must not end the watch.
                logger.exception("memory could not be measured")


def _log(before: MemoryPressure, pressure: MemoryPressure, host: HostMemory) -> None:
    fields = {"used": host.used, "limit": host.limit, "limited_by": host.source, "pressure": pressure.value}
    if pressure is MemoryPressure.NONE:
        logger.info("memory is not short any more", extra=fields)
    elif before is MemoryPressure.NONE:
        logger.warning(
            "memory is short: sequences wait for admission. Raise the limit of the container, or lower "
            "QUIRE_CPU_KV_BYTES or QUIRE_SWAP_SPACE",
            extra=fields,
        )
    else:
        logger.log(logging.WARNING if pressure is MemoryPressure.CRITICAL else logging.INFO, "memory", extra=fields)
