"""Calls that a signal interrupts between steps of gRPC, and never within one.

A handler of a signal raises its exception wherever the main thread is: KeyboardInterrupt, or SystemExit. Raised within
gRPC, it may leave a lock of the channel held, and the next call there, such as the one that cancels the request, would
never end. So calls run in a thread of their own, and the main thread only waits for what they give.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from quire_client.results import Chunk
from quire_client.resumable_stream import CANCEL_SECONDS
from quire_client.sync import Client, Stream

ResultT = TypeVar("ResultT")

_WAIT_SECONDS = 0.5


def chunks(stream: Stream) -> Iterator[Chunk]:
    """Yields the chunks of a stream. Leaving early closes it. Raises QuireError."""
    return _items(stream, stream.close)


def collected(call: Callable[[], ResultT], client: Client) -> ResultT:
    """What `call` returns, or raises. A signal closes the client, which ends the call."""
    (result,) = _items((call() for _ in range(1)), client.close)
    return result


def run_async(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As `asyncio.run`. A signal that comes just before the event loop waits does not end the wait, which another event
    has to do: so there is one now and then.
    """

    async def woken() -> ResultT:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_later(_WAIT_SECONDS, wake)

        wake()
        return await main

    return asyncio.run(woken())


@dataclass(frozen=True, slots=True)
class _Given(Generic[ResultT]):
    item: ResultT


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def _items(items: Iterable[ResultT], stop: Callable[[], None]) -> Iterator[ResultT]:
    """Yields what a thread reads from `items`. Where it is left early, `stop` has to end that thread's wait."""
    queue: SimpleQueue[_Given[ResultT] | _End] = SimpleQueue()  # one that a signal's exception leaves whole

    def read() -> None:
        error = None
        try:
            for item in items:
                queue.put(_Given(item))
        except BaseException as raised:  # raised again where it is waited for
            error = raised
        queue.put(_End(error))

    try:
        Thread(target=read, daemon=True).start()
        while isinstance(given := _next(queue), _Given):
            yield given.item
    except BaseException:  # such as KeyboardInterrupt, GeneratorExit
        _wait_for(stop)
        raise
    if given.error is not None:
        raise given.error


def _next(queue: SimpleQueue[ResultT]) -> ResultT:
    """The next item. A signal that comes just before a wait does not end it, and is seen after a time."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=_WAIT_SECONDS)


def _wait_for(stop: Callable[[], None]) -> None:
    """Runs `stop` in a thread too, for another signal may come, and waits as long as a request's cancellation takes."""
    done: SimpleQueue[None] = SimpleQueue()

    def run() -> None:
        try:
            stop()
        finally:
            done.put(None)

    Thread(target=run, daemon=True).start()
    with suppress(Empty):
        done.get(timeout=2 * CANCEL_SECONDS)
