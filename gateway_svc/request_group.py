"""The requests of one call, and the call's wait for their output."""

import asyncio
from collections.abc import Sequence
from typing import Self

import grpc

from gateway_svc.output import Chunk, Usage
from gateway_svc.rendering import Rendering
from gateway_svc.running_request import RunningRequest
from gateway_svc.session import SchedulerSession
from gateway_svc.subscriptions import Attachment
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.vocabulary import Vocabulary
from svc_common.errors import QuireError


class ClientDisconnected(Exception):  # noqa: N818
    """The client left before the answer was complete."""


class RequestGroup:
    """The requests of one call, one for each of its prompts. The end of the block releases those that still run."""

    def __init__(self, requests: Sequence[RunningRequest], wake: asyncio.Event) -> None:
        self.requests = requests
        self._wake = wake
        self._client_left = False
        self._attachments: dict[RunningRequest, Attachment] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # If one fails, the call fails with its error. Its client does not come back for the others, unless the error
        # is one to retry.
        codes = {request.failure.code for request in self.requests if request.failure is not None}
        on_disconnect = OnDisconnect.CANCEL if codes - {grpc.StatusCode.UNAVAILABLE} else None
        for request in self.requests:
            self._release(request, on_disconnect or request.on_disconnect)
            request.close()

    def start(self, session: SchedulerSession, deadline: float | None) -> None:
        """Subscribes to the requests. `deadline` is on the monotonic clock, in seconds. Raises QuireError."""
        for request in self.requests:
            request.prepare()
            call = request.generate_call
            self._attachments[request] = session.subscribe(call.key, call.submit, request, deadline)

    def give_up(self, error: QuireError) -> None:
        """Fails the requests that still run."""
        for request in self.requests:
            self._release(request, request.on_disconnect)
            request.on_failed(error)

    @property
    def renderings(self) -> list[Rendering]:
        """How their tokens become text; set once they are accepted."""
        return [request.rendering for request in self.requests]

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of their model; set once they are accepted."""
        return self.requests[0].vocabulary

    @property
    def num_logprobs(self) -> int:
        """How many log-probabilities the answer has so far. Each takes about 10 µs to render."""
        return sum(request.num_logprobs for request in self.requests)

    @property
    def is_durable(self) -> bool:
        """Whether all of them survive their scheduler, as of their acceptance."""
        return all(request.is_durable for request in self.requests)

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, over all requests."""
        return sum((request.usage for request in self.requests), Usage())

    def client_disconnected(self) -> None:
        """Ends any wait for output with ClientDisconnected."""
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
        """Waits for the next chunks, each with its prompt index; an empty list at the end.

        Raises the QuireError of a request that failed, after all chunks before it, or ClientDisconnected. May be
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

    def _release(self, request: RunningRequest, on_disconnect: OnDisconnect) -> None:
        # A request that was not subscribed to must not end the one that has its key.
        if request in self._attachments:
            self._attachments[request].release(on_disconnect)

    async def _change(self) -> None:
        self._wake.clear()
        if not self._client_left:
            await self._wake.wait()
        if self._client_left:
            raise ClientDisconnected
