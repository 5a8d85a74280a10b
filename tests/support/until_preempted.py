"""Serves until a sequence is preempted."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from deployment import Deployment

_ROUNDS = 10
Answers = TypeVar("Answers")


async def until_preempted(
    running: Deployment, method: str, serve: Callable[[], Awaitable[Answers]]
) -> AsyncIterator[Answers]:
    """The answers of each round, until a sequence is preempted by `method`. Most often that takes one round; it depends
    on when requests arrive, which depends on the machine.

    Raises:
        AssertionError: None was preempted in ten rounds.
    """
    metric = f'quire_preemptions_total{{method="{method}"}}'
    for _ in range(_ROUNDS):
        yield await serve()
        if running.metrics()[metric]:
            return
    raise AssertionError(f"no sequence was preempted by {method} in {_ROUNDS} rounds")
