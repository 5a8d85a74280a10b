"""Calls of an event loop's own values from other threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ANSWER_SECONDS = 2.0
"""Time for an event loop to answer another thread."""

T = TypeVar("T")


def call_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """What a function returns, or raises, on an event loop. Must not be called on the loop's own thread.

    Raises TimeoutError if the loop does not get to it in ANSWER_SECONDS, RuntimeError if it is closed.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    loop.call_soon_threadsafe(run)
    return answer.result(ANSWER_SECONDS)
