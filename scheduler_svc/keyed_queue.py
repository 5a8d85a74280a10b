"""Runs the commands of each key one after the other, also where one waits; those of different keys run concurrently."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine

log = logging.getLogger("quire.scheduler")

Command = Callable[[], Coroutine[None, None, None] | None]
"""Done when it returns, or returns the rest as a coroutine."""


class KeyedQueue:
    """The commands that wait, by key, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Command]] = {}  # by key, after the one that runs
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, key: str, command: Command) -> None:
        """Runs a command now, or after the earlier ones of its key."""
        if key in self._waiting:
            self._waiting[key].append(command)
            return
        try:
            rest = command()
        except Exception:
            log.exception("a command failed")  # no other request is affected
            return
        if rest is not None:
            self._waiting[key] = deque()
            task = asyncio.create_task(self._finish(key, rest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, key: str, rest: Coroutine[None, None, None]) -> None:
        try:
            await rest
        except Exception:
            log.exception("a command failed")
        waiting = self._waiting.pop(key)
        while waiting:
            self.take(key, waiting.popleft())
            if key in self._waiting:
                self._waiting[key].extend(waiting)
                return
