"""Commands that wait, and later ones of the same key."""

import asyncio
from collections.abc import Coroutine

from scheduler_svc.keyed_queue import Command, KeyedQueue


class Script:
    """Records commands that are done. Waiting ones are done when the gate is open."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gate = asyncio.Event()

    def now(self, name: str) -> Command:
        return lambda: self.done.append(name)

    def later(self, name: str) -> Command:
        async def wait() -> None:
            await self.gate.wait()
            self.done.append(name)

        return wait

    def failing(self) -> Command:
        async def fail() -> None:
            await self.gate.wait()
            raise ValueError("scripted failure")

        return fail

    async def until(self, num_done: int) -> None:
        async with asyncio.timeout(60):
            while len(self.done) < num_done:
                await asyncio.sleep(0)


async def test_what_need_not_wait_is_done_at_once() -> None:
    script, turns = Script(), KeyedQueue()
    turns.take("a", script.now("one"))
    assert script.done == ["one"]


async def test_commands_of_a_key_keep_their_order_and_hold_up_no_other_key() -> None:
    script, turns = Script(), KeyedQueue()
    for name in ("one", "three"):
        turns.take("a", script.later(name))
        turns.take("a", script.now(chr(ord(name[0]) + 1)))
    turns.take("b", script.now("other"))
    assert script.done == ["other"]
    script.gate.set()
    await script.until(5)
    assert script.done == ["other", "one", "p", "three", "u"]


async def test_a_command_that_fails_holds_up_nothing() -> None:
    script, turns = Script(), KeyedQueue()
    turns.take("a", script.failing())
    turns.take("a", broken)
    turns.take("a", script.now("behind"))
    script.gate.set()
    await script.until(1)
    turns.take("a", script.now("anew"))
    assert script.done == ["behind", "anew"]


def broken() -> Coroutine[None, None, None] | None:
    raise ValueError("scripted failure")
