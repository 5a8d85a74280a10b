"""gRPC messages that arrive slowly: grpc holds what has come of one, so places bound how many there are."""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from gateway_svc.tenant_shares import NoShare, Share

_PROMPT_SECONDS = 1.0  # a message that takes longer counts among those that arrive slowly


async def receive(messages: AsyncIterator[Any], slow: Share) -> Any:
    """The next message. It takes a place while it is late. Raises NoShare where none is free, StopAsyncIteration."""
    loop = asyncio.get_running_loop()
    refusal: NoShare | None = None

    def is_slow() -> None:
        nonlocal refusal
        try:
            slow.add(1)
        except NoShare as error:
            refusal = error
            limit.reschedule(loop.time())

    timer = loop.call_later(_PROMPT_SECONDS, is_slow)
    try:
        async with asyncio.timeout(None) as limit:
            return await anext(messages)
    except TimeoutError:
        if refusal is None:
            raise
        raise refusal from None
    finally:
        timer.cancel()
        slow.release()


async def receive_next(messages: AsyncIterator[Any], slow: Share, running: Collection[asyncio.Task[None]]) -> Any:
    """The next message of a stream whose requests are `running`. Raises NoShare, and StopAsyncIteration.

    A client that waits for answers sends nothing, and so may one that has sent a part of a message. So
    the stream takes a place while it reads beside its requests. Where none is free, it reads when they have ended: it
    is refused only while it has none, and grpc takes no more of a message than its window until it is read.
    """
    while running:
        try:
            slow.add(1)
        except NoShare:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            continue
        try:
            return await anext(messages)
        finally:
            slow.release()
    return await receive(messages, slow)
