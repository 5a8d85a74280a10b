"""Another thread calls a function on an event loop."""

import asyncio
import threading

import pytest

from svc_common.loop_calls import call_on_loop


async def test_a_function_runs_on_the_thread_of_the_loop() -> None:
    found = await asyncio.to_thread(call_on_loop, asyncio.get_running_loop(), threading.get_ident)
    assert found == threading.get_ident()


async def test_an_error_of_the_function_is_raised_in_the_calling_thread() -> None:
    def fail() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await asyncio.to_thread(call_on_loop, asyncio.get_running_loop(), fail)


def test_a_closed_loop_is_an_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError):
        call_on_loop(loop, threading.get_ident)
