"""How a call learns that one of its requests has changed."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ChangeSignal(asyncio.Event):
    """Set at each change. While it has a listener, that is called instead, before `set` returns."""

    def __init__(self) -> None:
        super().__init__()
        self._listener: Callable[[], None] | None = None

    def set(self) -> None:
        if self._listener is None:
            super().set()
        else:
            self._listener()

    @contextmanager
    def calling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Calls `listener`, which raises nothing, at each change, and once at the beginning. The signal is set at the
        end: there may be changes that the listener has not looked at."""
        self._listener = listener
        try:
            listener()
            yield
        finally:
            self._listener = None
            super().set()
