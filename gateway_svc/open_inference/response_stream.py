"""The responses of a stream, which several requests write."""

import asyncio
from collections.abc import Iterable
from typing import Any

from gateway_svc.grpc_calls import GrpcContext
from quire.open_inference.v2 import open_inference_pb2 as pb


class ResponseStream:
    """Writes one response after the other.

    A task must not be cancelled within a write: grpc could then not send the status of the call.
    """

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._writer: asyncio.Task[Any] | None = None
        self._has_ended = False

    async def write(self, response: pb.ModelStreamInferResponse) -> None:
        """Writes a response. Raises CancelledError after the end, and grpc's InternalError after the client left."""
        async with self._lock:
            self._writer = asyncio.current_task()
            try:
                await self._context.write(response)
            finally:
                self._writer = None
        if self._has_ended:
            raise asyncio.CancelledError

    async def end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Cancels the tasks that write, and waits for them. The one within a write ends with it."""
        self._has_ended = True
        ending = list(tasks)
        for task in ending:
            if task is not self._writer:
                task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
