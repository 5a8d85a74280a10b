"""Profiles of this worker's steps by torch.profiler, in the directory that the operator sets."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from worker_svc.device_thread import DeviceThread

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger("quire.worker")

T = TypeVar("T")

_MAX_SECONDS = 120.0  # after which a profile ends by itself: its events are kept in memory


class ProfileRefused(Exception):  # noqa: N818
    """A profile cannot start or stop. The text says why."""


class Profiles:
    """At most one profile at a time, of all threads and of the GPU. Without a directory, none."""

    def __init__(self, directory: Path | None, device: DeviceThread, max_seconds: float = _MAX_SECONDS) -> None:
        self._directory = directory
        self._device = device
        self._max_seconds = max_seconds
        self._lock = asyncio.Lock()
        self._running: profile | None = None
        self._limit: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Task[Any]] = set()
        self._numbers = count(1)

    async def start(self) -> None:
        """Starts a profile. Raises ProfileRefused where one runs, or where there is no directory."""
        if self._directory is None:
            raise ProfileRefused("this worker makes no profiles: its operator has not set QUIRE_PROFILE_DIR")
        await self._run_whole(self._start())

    async def stop(self) -> Path:
        """Ends the profile, and returns the file of its trace. Raises ProfileRefused where none runs, or where the file
        cannot be written.
        """
        if self._directory is None:
            raise ProfileRefused("this worker makes no profiles: its operator has not set QUIRE_PROFILE_DIR")
        return await self._run_whole(self._stop(self._directory))

    async def _run_whole(self, change: Coroutine[None, None, T]) -> T:
        """Runs a change to its end, also if the caller is cancelled: a profile that runs always has its time limit."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _start(self) -> None:
        async with self._lock:
            if self._running is not None:
                raise ProfileRefused("a profile runs already")
            self._running = await self._device.run(_start)
            self._limit = asyncio.create_task(self._end_late())

    async def _stop(self, directory: Path) -> Path:
        async with self._lock:
            ended, self._running = self._running, None
            if ended is None:
                raise ProfileRefused(f"no profile runs; one ends by itself after {self._max_seconds:.0f} s")
            if self._limit is not None:
                self._limit.cancel()
            await self._device.run(ended.stop)
            name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{next(self._numbers)}.pt.trace.json.gz"
            path = (directory / name).absolute()
            try:
                await asyncio.to_thread(_write, ended, path)
            except OSError as error:
                raise ProfileRefused(f"the trace cannot be written: {error}") from error
            log.info("profile written", extra={"path": str(path)})
            return path

    async def _end_late(self) -> None:
        await asyncio.sleep(self._max_seconds)
        with suppress(ProfileRefused):  # it was stopped just now
            await self.stop()


def _start() -> "profile":
    """Starts a profile of all threads, since a CPU computes in another one than this, and of the GPU, if any."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    started = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    started.start()
    return started


def _write(ended: "profile", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ended.export_chrome_trace(str(path))
