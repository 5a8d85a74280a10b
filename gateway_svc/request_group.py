"""The requests of one call, and the call's wait for their output or their values."""

from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

import grpc

from gateway_svc import request_errors
from gateway_svc.change_signal import ChangeSignal
from gateway_svc.embeddings import EmbeddingParams
from gateway_svc.output import Chunk, Usage
from gateway_svc.reader import Reader
from gateway_svc.rendering import Rendering
from gateway_svc.running_request import RunningRequest, log_end
from gateway_svc.running_value import RunningValue
from gateway_svc.session import SchedulerSession
from gateway_svc.subscriptions import Attachment
from gateway_svc.tracing import GenerationSpan
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import Vector
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError, Reason


class ClientDisconnected(Exception):  # noqa: N818
    """The client left before the answer was complete."""


class GroupMember(Reader, Protocol):
    """A request of a call."""

    failure: QuireError | None

    @property
    def key(self) -> str:
        """The key by which the scheduler knows it."""

    @property
    def submit(self) -> scheduler_pb2.Submit | None:
        """What is submitted; None: the request must exist."""

    @property
    def usage(self) -> Usage:
        """Tokens processed so far."""

    @property
    def on_disconnect(self) -> OnDisconnect:
        """What becomes of it when its client leaves."""

    def prepare(self) -> None:
        """Called before it is subscribed to. Raises QuireError."""

    def close(self) -> None:
        """The call is over."""


M = TypeVar("M", bound=GroupMember)


class SubscribedGroup(Generic[M]):
    """The requests of one call, one for each of its prompts. The end of the block releases those that still run."""

    def __init__(self, signal: ChangeSignal) -> None:
        """`signal` is set at each change of a request."""
        self.requests: list[M] = []
        self.signal = signal
        self._client_left = False
        self._attachments: dict[int, Attachment] = {}
        """By the prompt index of the request."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # If one fails, the call fails with its error. Its client does not come back for the others, unless the error
        # is one to retry.
        codes = {request.failure.code for request in self.requests if request.failure is not None}
        on_disconnect = OnDisconnect.CANCEL if codes - {grpc.StatusCode.UNAVAILABLE} else None
        for prompt_index, request in enumerate(self.requests):
            self._release(prompt_index, on_disconnect or request.on_disconnect)
            request.close()

    def start(self, request: M, session: SchedulerSession, deadline: float | None) -> None:
        """Adds a request and subscribes to it. `deadline` is on the monotonic clock, in seconds. Raises QuireError."""
        prompt_index = len(self.requests)
        self.requests.append(request)
        request.prepare()
        self._attachments[prompt_index] = session.subscribe(request.key, request.submit, request, deadline)

    def give_up(self, error: QuireError) -> None:
        """Fails the requests that still run."""
        for prompt_index, request in enumerate(self.requests):
            self._release(prompt_index, request.on_disconnect)
            request.on_failed(error)

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, over all requests."""
        return sum((request.usage for request in self.requests), Usage())

    def client_disconnected(self) -> None:
        """Ends any wait with ClientDisconnected."""
        self._client_left = True
        self.signal.set()

    def _release(self, prompt_index: int, on_disconnect: OnDisconnect) -> None:
        # A request that was not subscribed to must not end the one that has its key.
        if prompt_index in self._attachments:
            self._attachments[prompt_index].release(on_disconnect)

    def _raise_failure(self) -> None:
        """Raises the QuireError of the first request that failed."""
        for request in self.requests:
            if request.failure is not None:
                raise request.failure

    async def _changed(self) -> None:
        """Waits until a request has changed since `signal` was cleared. Raises ClientDisconnected."""
        if not self._client_left:
            await self.signal.wait()
        if self._client_left:
            raise ClientDisconnected


class RequestGroup(SubscribedGroup[RunningRequest]):
    """The requests of a call to generate."""

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

    async def accepted(self) -> None:
        """Waits until every request is accepted. Raises the QuireError of one that is not, or ClientDisconnected."""
        while not all(request.is_accepted for request in self.requests):
            self.signal.clear()
            await self._changed()
        self._raise_failure()

    async def next(self) -> list[tuple[int, Chunk]]:
        """Waits for the next chunks, each with its prompt index; an empty list at the end.

        Raises the QuireError of a request that failed, after all chunks before it, or ClientDisconnected. May be
        cancelled and called again without loss.
        """
        while True:
            if not self.signal.is_set():  # what has not changed is not looked at, for each token of a stream
                await self._changed()
            is_over = self.is_over
            if not is_over:
                self.signal.clear()
            if chunks := self.take():
                return chunks
            if is_over:
                self._raise_failure()
                return []

    def take(self) -> list[tuple[int, Chunk]]:
        """The chunks that have come since, each with its prompt index."""
        if len(self.requests) == 1:  # for each token of a stream
            return [(0, chunk) for chunk in self.requests[0].pop_pending()]
        return [
            (prompt_index, chunk)
            for prompt_index, request in enumerate(self.requests)
            for chunk in request.pop_pending()
        ]

    @property
    def is_over(self) -> bool:
        """Whether no chunks come that are not here: all requests have ended, or the call fails with the error of one.
        Then the next wait is over at once."""
        is_over = True
        for request in self.requests:
            if request.failure is not None:
                return True
            is_over = is_over and request.is_finished
        return is_over

    async def all(self) -> list[tuple[int, Chunk]]:
        """Waits for all chunks. Raises as `next` does."""
        chunks: list[tuple[int, Chunk]] = []
        while more := await self.next():
            chunks += more
        return chunks


class ValueGroup(SubscribedGroup[RunningValue]):
    """The requests of a call for values. They have one span, and one line in the log."""

    def __init__(
        self, signal: ChangeSignal, validated: Sequence[ValidatedValue], tenant: str, span: GenerationSpan
    ) -> None:
        """`validated` are all requests of the call."""
        super().__init__(signal)
        self._validated = validated
        self._tenant = tenant
        self._span = span

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        reason: Reason | None = None
        if isinstance(error := exc[1], QuireError):
            reason = error.reason
        elif len(self.requests) < len(self._validated) or not all(one.is_finished for one in self.requests):
            reason = Reason.CANCELLED
        self._span.end(self.usage, [], reason)
        first = self._validated[0]
        log_end(first.request_id, self._tenant, first.model, self.usage, reason)

    async def values(self) -> list[Vector]:
        """Waits for all values, in the order of the prompts.

        Raises the QuireError of the first request that failed, or ClientDisconnected; also QuireError if a worker with
        another version of the model computed some of them: such values cannot be compared.
        """
        while True:
            self._raise_failure()
            values = [request.value for request in self.requests if request.value is not None]
            if len(values) < len(self.requests):
                self.signal.clear()
                await self._changed()
                continue
            if len({request.model_fingerprint for request in self.requests} - {b""}) > 1:
                raise request_errors.unavailable("the model was replaced meanwhile")
            if isinstance(self._validated[0].params, EmbeddingParams):
                self._span.embedded(len(values[0]))
            return values
