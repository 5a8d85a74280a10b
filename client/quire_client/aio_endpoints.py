"""The gateways of the asyncio client: a channel each, calls that are repeated, and probes of silent gateways."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.connection import Connection, channel_options
from quire_client.endpoints import BaseEndpoint, BaseEndpointPool, WatchedCall
from quire_client.errors import BROKEN_STREAM, QuireError, closed, is_no_response, quire_errors, unreachable
from quire_client.resumable_stream import (
    CANCEL_SECONDS,
    KEEPALIVE_SECONDS,
    PROBE_SECONDS,
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


class AsyncEndpoint(BaseEndpoint):
    """An endpoint with a channel of the running event loop, which is made at the first call."""

    def __init__(self, index: int, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        super().__init__(index, connection)
        self._interceptors = interceptors
        self._channel: grpc.aio.Channel | None = None
        self._watched: set[WatchedCall[grpc.aio.Call]] = set()
        self._check_task: asyncio.Task[None] | None = None

    @cached_property
    def stub(self) -> "InferenceServiceAsyncStub":
        # Not made in __init__: a channel belongs to the event loop that runs when it is made.
        options = channel_options(self._address)
        to, credentials = self._address, self._connection.credentials
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(to, options=options, interceptors=self._interceptors)
        else:
            self._channel = grpc.aio.secure_channel(to, credentials, options=options, interceptors=self._interceptors)
        return InferenceServiceStub(self._channel)

    @contextmanager
    def watching(self, call: grpc.aio.Call, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError. Where `is_watched`, cancels it if the gateway is silent."""
        watched = WatchedCall(call)
        if is_watched:
            self._watched.add(watched)
            if self._check_task is None or self._check_task.done():
                self.record_activity()
                self._check_task = asyncio.create_task(self._check_watched())
        try:
            with quire_errors(self.name):
                yield
        except asyncio.CancelledError:
            # grpc raises it where anyone has cancelled the call.
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
        """Cancels all calls and closes the connection."""
        self._is_closed = True
        if self._check_task is not None:
            self._check_task.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _check_watched(self) -> None:
        """Probes the gateway after each KEEPALIVE_SECONDS of silence, until no call is watched."""
        while True:
            await asyncio.sleep(max(0.0, self._last_activity + KEEPALIVE_SECONDS - monotonic()))
            asked = tuple(self._watched)
            if not asked:
                return
            if monotonic() - self._last_activity >= KEEPALIVE_SECONDS:
                await self._send_probe(asked)
                self.record_activity()

    async def _send_probe(self, asked: Sequence[WatchedCall[grpc.aio.Call]]) -> None:
        """Cancels the calls if the gateway does not answer ListModels."""
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                await self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_no_response(error):
                for watched in asked:
                    watched.is_abandoned = True
                    watched.call.cancel()


class AsyncEndpointPool(BaseEndpointPool[AsyncEndpoint]):
    """The endpoints of an asyncio client."""

    def __init__(self, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        self._closed = asyncio.Event()
        super().__init__(
            connection, [AsyncEndpoint(i, connection, interceptors) for i in range(len(connection.addresses))]
        )

    async def call(
        self,
        method: Callable[["InferenceServiceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        retry_policy: RetryPolicy,
        traceparent: str | None = None,
    ) -> ResponseT:
        """Makes a unary call, and repeats it as `retry_policy` says. Raises QuireError."""
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
        endpoint, request, options = self._begin_stream_call(resumable, traceparent)
        if isinstance(request, pb.ResumeRequest):
            return endpoint.stub.Resume(request, **options), endpoint
        return endpoint.stub.StreamGenerate(request, **options), endpoint

    async def wait_to_resume(self, resumable: ResumableStream, error: QuireError, endpoint: AsyncEndpoint) -> None:
        """Waits until a stream may be resumed after `error`, which is raised where it may not."""
        if self._closed.is_set():
            raise closed("the client") from error
        await self._pause(resumable.failed(error, endpoint.index, monotonic()))

    @asynccontextmanager
    async def cancel_on_exit(self, name: str | None) -> AsyncIterator[None]:
        """Cancels the request of this name where the block is left before the request's end.

        Its name would keep it running otherwise. With None it does nothing.
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
        except BaseException:  # such as GeneratorExit, CancelledError, KeyboardInterrupt
            await self.cancel(name)
            raise
        finally:
            self._request_ids.discard(name)

    async def cancel(self, name: str) -> None:
        """Cancels a request, once. Where that fails within CANCEL_SECONDS, the server's grace period ends it."""
        if name in self._request_ids and not self._closed.is_set():
            self._request_ids.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                await self.call(lambda stub: stub.Cancel, request, RetryPolicy(self.endpoint_list, CANCEL_SECONDS))

    async def close(self) -> None:
        """Cancels all calls and closes the connections."""
        await asyncio.gather(*map(self.cancel, tuple(self._request_ids)))
        self._closed.set()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        if self._closed.is_set():
            raise closed("the client")
