"""Starts all roles, and stops them in order on a signal or when a role fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from svc_common.signals import ending_signals
from svc_common.supervisor.console import Console
from svc_common.supervisor.roles import Role, StartTier
from svc_common.supervisor.runner import RestartPolicy, RoleRunner

_ONE_SIGNAL_SECONDS = 1.0
"""Signals within this time count as one: make forwards a SIGTERM that its whole process group got already."""

Step = Callable[[], Awaitable[None]]


class RoleGroup:
    """The roles of one deployment."""

    def __init__(
        self,
        roles: Sequence[Role],
        console: Console,
        *,
        policy: RestartPolicy,
        stop_seconds: float,
        on_change: Callable[[dict[str, Any]], None],
    ) -> None:
        """`on_change` is called with `snapshot()` at each change."""
        self._console = console
        self._stop_seconds = stop_seconds
        self._on_change = on_change
        self._runners = [RoleRunner(role, policy, console, self._changed) for role in roles]
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = False
        self._signalled_at: float | None = None

    async def run(self, *, prepare: Step, announce: Callable[[], None]) -> None:
        """Prepares, starts every role, announces that all answer, and returns when all have ended after a signal.

        Raises what `prepare` raises, and RoleFailed, when all have ended.
        """
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        signals = ending_signals()
        for number in signals:
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        self._spawn(self._start_all(prepare, announce))
        try:
            await self._end
        finally:
            await self._stop_all()
            for number in signals:
                asyncio.get_running_loop().remove_signal_handler(number)

    def snapshot(self) -> dict[str, Any]:
        """Whether all are ready, and process id, state and restarts by role, for JSON."""
        return {
            "ready": self._ready,
            "roles": {
                runner.role.name: {
                    "pid": runner.pid,
                    "state": runner.state.value,
                    "restarts": runner.num_restarts,
                }
                for runner in self._runners
            },
        }

    async def _start_all(self, prepare: Step, announce: Callable[[], None]) -> None:
        await prepare()
        stores = [runner for runner in self._runners if runner.role.tier is StartTier.STORE]
        services = [runner for runner in self._runners if runner.role.tier is not StartTier.STORE]
        with self._console.waiting() as waiting:
            for together in (stores, services):
                for runner in together:
                    self._spawn(runner.run())
                while missing := [runner.role.name for runner in together if not runner.ready.is_set()]:
                    waiting.show(f"waiting for {', '.join(missing)}")
                    await asyncio.sleep(0.1)
        self._ready = True
        self._changed()
        announce()

    async def _stop_all(self) -> None:
        """Stops tier by tier from the top: a role that drains can still use those below it."""
        self._ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with self._console.waiting() as waiting:
            for tier in sorted(StartTier, reverse=True):
                stopping = {
                    asyncio.create_task(runner.stop(self._stop_seconds)): runner.role.name
                    for runner in self._runners
                    if runner.role.tier is tier
                }
                while running := [name for task, name in stopping.items() if not task.done()]:
                    waiting.show(f"stopping {', '.join(running)}")
                    await asyncio.wait(stopping, timeout=0.1)
                for task in stopping:
                    task.result()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._end.done():
            self._end.set_exception(error)

    def _signalled(self) -> None:
        now = monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._console.write_line("stopping; a second signal kills")
            if not self._end.done():
                self._end.set_result(None)
        elif now - self._signalled_at >= _ONE_SIGNAL_SECONDS:
            for runner in self._runners:
                runner.kill()

    def _changed(self) -> None:
        self._on_change(self.snapshot())
