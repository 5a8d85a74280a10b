"""Calls in a thread, which signals interrupt from outside."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from threading import Event, Thread, Timer, current_thread, main_thread

import pytest

from quire_client.cli.interruptible import chunks, collected, run_async
from quire_client.errors import QuireError, closed

FIRST = object()


class Blocked:
    """A stream that gives one item and then blocks until it is closed, and a client whose call blocks so."""

    def __init__(self) -> None:
        self.is_blocking = Event()
        self.closed = Event()
        self.may_close = Event()
        self.may_close.set()
        self.threads = [main_thread()]

    def __iter__(self) -> Iterator[object]:
        self.threads = [current_thread()]
        yield FIRST
        self._block()

    def call(self) -> str:
        self.threads = [current_thread()]
        self._block()
        return "too late"

    def close(self) -> None:
        self.threads.append(current_thread())
        self.closed.set()
        self.may_close.wait()

    def _block(self) -> None:
        self.is_blocking.set()
        self.closed.wait()
        raise closed("the stream")


def interrupt(*times: Event) -> None:
    """Sends this process the signal of Ctrl-C at each of these times."""

    def run() -> None:
        for time in times:
            time.wait()
            os.kill(os.getpid(), signal.SIGINT)

    Thread(target=run, daemon=True).start()


def read(blocked: Blocked) -> None:
    assert list(chunks(blocked)) == []  # type: ignore[arg-type]


def call(blocked: Blocked) -> None:
    collected(blocked.call, blocked)  # type: ignore[arg-type]


def test_items_results_and_errors_are_handed_on() -> None:
    class Stream(list[str]):
        def close(self) -> None:
            raise AssertionError("nothing is left early")

    def fail() -> None:
        raise closed("the server")

    assert "".join(map(str, chunks(Stream("abc")))) == "abc"  # type: ignore[arg-type]
    assert collected(lambda: "whole", Blocked()) == "whole"  # type: ignore[arg-type]
    with pytest.raises(QuireError, match="the server"):
        collected(fail, Blocked())  # type: ignore[arg-type]


def test_a_stream_that_is_left_is_closed_at_once() -> None:
    blocked = Blocked()
    reading = chunks(blocked)  # type: ignore[arg-type]
    assert next(reading) is FIRST
    del reading
    assert blocked.closed.is_set()


@pytest.mark.parametrize("wait", [read, call])
def test_a_signal_interrupts_the_wait_and_never_the_call(wait: Callable[[Blocked], None]) -> None:
    blocked = Blocked()
    interrupt(blocked.is_blocking)
    with pytest.raises(KeyboardInterrupt):
        wait(blocked)
    assert blocked.closed.is_set()
    assert len(blocked.threads) == 2
    assert main_thread() not in blocked.threads


@pytest.mark.parametrize("wait", [read, call])
def test_a_second_signal_does_not_wait_for_the_cancellation(wait: Callable[[Blocked], None]) -> None:
    blocked = Blocked()
    blocked.may_close.clear()
    interrupt(blocked.is_blocking, blocked.closed)
    with pytest.raises(KeyboardInterrupt):
        wait(blocked)
    blocked.may_close.set()


def test_what_does_not_wake_an_event_loop_is_seen_all_the_same() -> None:
    """As a signal that comes just before the loop waits: here a callback of another thread."""
    results: list[str] = []

    async def wait() -> str:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[str] = loop.create_future()
        Timer(0.1, lambda: loop.call_soon(arrived.set_result, "seen")).start()
        return await arrived

    running = Thread(target=lambda: results.append(run_async(wait())), daemon=True)
    running.start()
    running.join(30)
    assert results == ["seen"]
