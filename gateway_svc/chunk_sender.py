"""Sends chunks to a gRPC client in the turn of the event loop in which their tokens come."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from gateway_svc.grpc_calls import GrpcContext
from gateway_svc.output import Chunk
from gateway_svc.request_group import RequestGroup

R = TypeVar("R")


class ChunkSender(Generic[R]):
    """Sends the chunks of a call as they come, each in a response, for as long as they can be rendered at once.

    A task that waits for a chunk and then for its write is resumed twice for a token, through all the frames around it.
    Here a write starts where the tokens are delivered, and the next delivery sees that it has ended. Only a write that
    has not ended by then is waited for, and the last one. While it waits for a slow client, chunks become longer, as
    they do elsewhere.
    """

    def __init__(self, context: GrpcContext, group: RequestGroup, render: Callable[[Chunk], R]) -> None:
        """No response of `context` may be written by others until `run` returns."""
        self._context = context
        self._group = group
        self._render = render
        self._unsent: list[tuple[int, Chunk]] = []
        """The last one is sent first."""
        self._write: Coroutine[Any, Any, None] | None = None
        """The latest write, until it is known to have ended: when `_written` is done."""
        loop = asyncio.get_running_loop()
        self._written: asyncio.Future[None] = loop.create_future()
        self._is_waited_for = False
        self._ended: asyncio.Future[None] = loop.create_future()

    async def run(self) -> None:
        """Returns when no more chunks come. The group's `next` then ends, or raises, as it would have.

        Raises what writing raises.
        """
        try:
            with self._group.signal.calling(self._changed):
                await self._ended
        finally:
            self._ended.cancel()
            self._changed()  # an error of the last write must not be left in its future

    def _changed(self) -> None:
        if self._is_waited_for:
            return  # also where the write has ended, and its callback was not called yet
        if self._write is None or self._written.done():
            self._send()
        else:
            self._wait_for_write()

    def _wait_for_write(self) -> None:
        self._is_waited_for = True
        self._written.add_done_callback(self._send_after_write)

    def _send_after_write(self, _: asyncio.Future[None]) -> None:
        self._is_waited_for = False
        self._send()

    def _send(self) -> None:
        """Writes what there is, until a write has to be waited for. None may be unended."""
        try:
            if self._write is not None:
                self._end_write(self._write)
            while not self._ended.done():
                unsent = self._unsent or self._group.take()[::-1]
                if not unsent:
                    if self._group.is_over:
                        self._ended.set_result(None)
                    return
                _, chunk = unsent.pop()
                self._unsent = unsent
                if self._has_to_wait(self._context.write(self._render(chunk))):
                    if unsent or self._group.is_over:
                        self._wait_for_write()
                    return
        except Exception as error:
            # Without effect where the call has ended, as when its client left during the write.
            if not self._ended.done():
                self._ended.set_exception(error)

    def _has_to_wait(self, write: Coroutine[Any, Any, None]) -> bool:
        """Starts a write; whether it has not ended yet."""
        # A task would start in the next turn of the loop (Python 3.12 has eager tasks). grpc's write waits for one
        # future of the loop, and begins before that.
        try:
            self._written = write.send(None)
        except StopIteration:
            return False
        self._write = write
        return True

    def _end_write(self, write: Coroutine[Any, Any, None]) -> None:
        self._write = None
        try:
            write.send(None)
        except StopIteration:
            return
        raise RuntimeError("a write waits for a second future")
