"""The requests of one call, and whoever waits for them."""

import asyncio
from collections.abc import Sequence
from typing import Self

import grpc

from gateway_svc.output import Chunk, Usage
from gateway_svc.rendering import Rendering
from gateway_svc.running_request import RunningRequest
from gateway_svc.validated_request import OnDisconnect


class ClientDisconnected(Exception):  # noqa: N818
    """Nobody is left to take an answer."""


class RequestGroup:
    """The requests of one call, one for each of its prompts. Leaving the block leaves what still runs."""

    def __init__(self, requests: Sequence[RunningRequest], wake: asyncio.Event) -> None:
        self.requests = requests
        self._wake = wake
        self._client_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Once one has failed the call is answered with that, and nobody comes back for the others, unless it is to be
        # tried again.
        codes = {request.failure.code for request in self.requests if request.failure is not None}
        on_disconnect = OnDisconnect.CANCEL if codes - {grpc.StatusCode.UNAVAILABLE} else None
        for request in self.requests:
            request.close(on_disconnect)

    @property
    def renderings(self) -> list[Rendering]:
        """How their tokens become text; known once they are accepted."""
        return [request.rendering for request in self.requests]

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, over all requests."""
        return sum((request.usage for request in self.requests), Usage())

    def client_disconnected(self) -> None:
        """Notes that nobody waits any more: whoever does is told with ClientDisconnected."""
        self._client_left = True
        self._wake.set()

    async def accepted(self) -> None:
        """Waits until every request is accepted. Raises the QuireError of one that is not, or ClientDisconnected."""
        while not all(request.is_accepted for request in self.requests):
            await self._change()
        for request in self.requests:
            if request.failure is not None:
                raise request.failure

    async def next(self) -> list[tuple[int, Chunk]]:
        """Waits for the next chunks, each with the place of its request; none at the end.

        Raises, after all that came before, the QuireError of a request that failed, or ClientDisconnected. May be
        cancelled and called again without loss.
        """
        while True:
            chunks = [
                (prompt_index, chunk)
                for prompt_index, request in enumerate(self.requests)
                for chunk in request.pop_pending()
            ]
            if chunks:
                return chunks
            for request in self.requests:
                if request.failure is not None:
                    raise request.failure
            if all(request.is_finished for request in self.requests):
                return []
            await self._change()

    async def all(self) -> list[tuple[int, Chunk]]:
        """Waits for all chunks. Raises as `next` does."""
        chunks: list[tuple[int, Chunk]] = []
        while more := await self.next():
            chunks += more
        return chunks

    async def _change(self) -> None:
        self._wake.clear()
        if not self._client_left:
            await self._wake.wait()
        if self._client_left:
            raise ClientDisconnected
