"""The gateways of the asyncio client: a channel each, calls that move on, and an eye on those that fall silent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.connection import Connection, channel_options
from quire_client.errors import BROKEN_STREAM, QuireError, closed, is_no_response, quire_errors, unreachable
from quire_client.resumable_stream import (
    CANCEL_SECONDS,
    KEEPALIVE_SECONDS,
    PROBE_SECONDS,
    EndpointList,
    ResumableStream,
    RetryPolicy,
)

if TYPE_CHECKING:  # exists in the stubs only
    from quire.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

AsyncStreamCall = (
    grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]
    | grpc.aio.UnaryStreamCall[pb.ResumeRequest, pb.ResumeResponse]
)


@dataclass(eq=False, slots=True)
class _WatchedAsyncCall:
    """A call that ends where its gateway falls silent."""

    call: grpc.aio.Call
    is_abandoned: bool = False


class AsyncEndpoint:
    """One gateway, or what one name leads to. `index` is that in the roster."""

    def __init__(self, index: int, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        self.index = index
        self.name = connection.name  # of all: which one it was, no caller can do anything about
        self._address = connection.addresses[index]
        self._connection = connection
        self._interceptors = interceptors
        self._channel: grpc.aio.Channel | None = None
        self._watched: set[_WatchedAsyncCall] = set()
        self._last_activity = 0.0
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None

    @cached_property
    def stub(self) -> "InferenceServiceAsyncStub":
        """What calls go through."""
        # At the first call, not before: a channel belongs to the event loop that runs when it is made.
        options = channel_options(self._address)
        to, credentials = self._address, self._connection.credentials
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(to, options=options, interceptors=self._interceptors)
        else:
            self._channel = grpc.aio.secure_channel(to, credentials, options=options, interceptors=self._interceptors)
        return InferenceServiceStub(self._channel)

    def record_activity(self) -> None:
        """It said something just now."""
        self._last_activity = monotonic()

    @contextmanager
    def watching(self, call: grpc.aio.Call, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError; where `is_watched`, also the gateway's silence."""
        watched = _WatchedAsyncCall(call)
        if is_watched:
            self._watched.add(watched)
            if self._timer is None:
                self.record_activity()
                self._set_timer()
        try:
            with quire_errors(self.name):
                yield
        except asyncio.CancelledError:
            # grpc answers so where a call was cancelled, by whomever.
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            if self._is_closed:
                raise closed("the client") from None
            if watched.is_abandoned:
                raise unreachable(f"{self._address} does not answer any more") from None
            raise
        finally:
            self._watched.discard(watched)

    async def close(self) -> None:
        """Ends all calls and closes the connection."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _set_timer(self) -> None:
        wait = max(0.0, self._last_activity + KEEPALIVE_SECONDS - monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._watched:
            return
        if monotonic() - self._last_activity >= KEEPALIVE_SECONDS:
            self._probe = asyncio.create_task(self._send_probe())
        else:
            self._set_timer()

    async def _send_probe(self) -> None:
        """Ends all calls that are watched if the gateway does not even say what it serves."""
        asked = tuple(self._watched)
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                await self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_no_response(error):
                for watched in asked:
                    watched.is_abandoned = True
                    watched.call.cancel()
        self.record_activity()
        self._set_timer()


class AsyncEndpointPool:
    """Where the calls of one client go."""

    def __init__(self, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        self.is_closed = False
        self._connection = connection
        self._endpoints = [AsyncEndpoint(i, connection, interceptors) for i in range(len(connection.addresses))]
        self.endpoint_list = EndpointList(len(self._endpoints))
        self._request_ids: set[str] = set()

    async def call(
        self,
        method: Callable[["InferenceServiceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        retry_policy: RetryPolicy,
        traceparent: str | None = None,
    ) -> ResponseT:
        """Makes a call that has one answer, as often as `retry_policy` has it. Raises QuireError."""
        metadata = self._connection.metadata(traceparent)
        is_watched = retry_policy.resume_timeout is not None
        while True:
            endpoint = self._endpoints[self.endpoint_list.current]
            try:
                call = method(endpoint.stub)(request, timeout=retry_policy.begin_call(monotonic()), metadata=metadata)
                with endpoint.watching(call, is_watched=is_watched):
                    response = await call
            except QuireError as error:
                await self._pause(retry_policy.failed(error, endpoint.index, monotonic()))
            else:
                self.endpoint_list.has_answered = True
                endpoint.record_activity()
                return response

    def start_call(self, resumable: ResumableStream, traceparent: str | None) -> tuple[AsyncStreamCall, AsyncEndpoint]:
        """Makes the next call of a stream. Raises QuireError where there is no time left for one."""
        request, timeout = resumable.begin_call(monotonic())
        endpoint = self._endpoints[self.endpoint_list.current]
        metadata = self._connection.metadata(traceparent)
        if isinstance(request, pb.ResumeRequest):
            return endpoint.stub.Resume(request, timeout=timeout, metadata=metadata), endpoint
        return endpoint.stub.StreamGenerate(request, timeout=timeout, metadata=metadata), endpoint

    async def wait_to_resume(self, resumable: ResumableStream, error: QuireError, endpoint: AsyncEndpoint) -> None:
        """Waits until a stream may be taken up again after `error`, which is raised where it may not."""
        await self._pause(resumable.failed(error, endpoint.index, monotonic()))

    @asynccontextmanager
    async def cancel_on_exit(self, name: str | None) -> AsyncIterator[None]:
        """Cancels the request of this name where it is left before its end: the name would keep it running.

        Not where the server has ended it, and not one without such a name.
        """
        if name is None:
            yield
            return
        self._request_ids.add(name)
        try:
            yield
        except QuireError as error:
            if error.reason == BROKEN_STREAM:
                await self.cancel(name)
            raise
        except BaseException:  # left: by the end of a generator, a cancelled task, an interrupt
            await self.cancel(name)
            raise
        finally:
            self._request_ids.discard(name)

    async def cancel(self, name: str) -> None:
        """Cancels a request that is held, as far as that can be done in short time; else the server's grace ends it."""
        if name in self._request_ids and not self.is_closed:
            self._request_ids.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                await self.call(lambda stub: stub.Cancel, request, RetryPolicy(self.endpoint_list, CANCEL_SECONDS))

    async def close(self) -> None:
        """Ends all calls and closes the connections."""
        await asyncio.gather(*map(self.cancel, tuple(self._request_ids)))
        self.is_closed = True
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _pause(self, seconds: float) -> None:
        if seconds and not self.is_closed:
            await asyncio.sleep(seconds)
        if self.is_closed:
            raise closed("the client")
