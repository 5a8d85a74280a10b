"""The messages that wait to be written to a stream: those that came while it was busy are taken together."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MAX_TAKEN = 64
MAX_TAKEN_BYTES = 64 * 2**10
"""Of messages that are taken together. Their reader may keep all of them in memory for as long as it needs one."""


class Sized(Protocol):
    """A message of protobuf."""

    def ByteSize(self) -> int: ...  # noqa: N802


M = TypeVar("M", bound=Sized)


class MessageQueue(Generic[M]):
    """An unbounded queue with one reader."""

    def __init__(self, fits: Callable[[M, M], bool] = lambda first, other: True) -> None:
        """`fits` says whether a message may be taken together with the first one."""
        self._fits = fits
        self._messages: deque[M] = deque()
        self._is_closed = False
        self._wake = asyncio.Event()
        self._delay: asyncio.TimerHandle | None = None

    def put(self, message: M, *, delay: float = 0.0) -> None:
        """Adds a message, which belongs to the queue from now on.

        With a `delay`, in seconds, a reader that waits is not woken for it before that time: it takes it with the next
        message.
        """
        self._messages.append(message)
        if not delay:
            self._wake.set()
        elif self._delay is None:
            self._delay = asyncio.get_running_loop().call_later(delay, self._wake.set)

    def close(self) -> None:
        """No messages are expected after those so far."""
        self._is_closed = True
        self._wake.set()

    async def take(self, most: int = MAX_TAKEN) -> list[M]:
        """Waits for the next message, and returns it with those behind it that fit: `most` in all, which are small.
        Empty once the queue is closed and all messages are taken.
        """
        while not self._messages and not self._is_closed:
            self._wake.clear()
            await self._wake.wait()
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None
        if not self._messages:
            return []
        taken = [self._messages.popleft()]
        if not self._messages or most == 1:
            return taken
        num_bytes = taken[0].ByteSize()
        while self._messages and len(taken) < most and self._fits(taken[0], self._messages[0]):
            num_bytes += self._messages[0].ByteSize()
            if num_bytes > MAX_TAKEN_BYTES:
                break
            taken.append(self._messages.popleft())
        return taken
