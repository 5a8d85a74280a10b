"""Commands about one key take turns, also where one of them has to wait; those about different keys do not."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine

log = logging.getLogger("quire.scheduler")

Command = Callable[[], Coroutine[None, None, None] | None]
"""What is done at once, or returns what is left to do."""


class KeyedQueue:
    """Runs commands, each key's in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Command]] = {}  # by key, behind the one that is being done
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, key: str, command: Command) -> None:
        """Do a command now, or after those of its key that came before."""
        if key in self._waiting:
            self._waiting[key].append(command)
            return
        try:
            rest = command()
        except Exception:
            log.exception("a command failed")  # that is its request's misfortune, and no other's
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
