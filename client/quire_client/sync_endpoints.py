"""The gateways of the blocking client: a channel each, calls that are repeated, and probes of silent gateways."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Lock, Timer
from time import monotonic
from typing import Protocol, TypeVar

import grpc

from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from quire_client.connection import Connection, channel_options
from quire_client.endpoints import BaseEndpoint, BaseEndpointPool, WatchedCall
from quire_client.errors import (
    BROKEN_STREAM,
    QuireError,
    closed,
    closed_errors,
    is_no_response,
    quire_errors,
    unreachable,
)
from quire_client.resumable_stream import (
    CANCEL_SECONDS,
    KEEPALIVE_SECONDS,
    PROBE_SECONDS,
    ResumableStream,
    RetryPolicy,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Interceptor = grpc.UnaryUnaryClientInterceptor | grpc.UnaryStreamClientInterceptor


class Cancellable(Protocol):
    def cancel(self) -> bool: ...


class StreamCall(Cancellable, Protocol):
    """A call of StreamGenerate or Resume."""

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse | pb.ResumeResponse]: ...


class SyncEndpoint(BaseEndpoint):
    """An endpoint with a channel that threads share."""

    def __init__(self, index: int, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        super().__init__(index, connection)
        to, options = self._address, channel_options(self._address)
        self._channel = (
            grpc.insecure_channel(to, options)
            if connection.credentials is None
            else grpc.secure_channel(to, connection.credentials, options)
        )
        self.stub = InferenceServiceStub(grpc.intercept_channel(self._channel, *interceptors))
        self._lock = Lock()  # of what is watched, and of the timer
        self._watched: set[WatchedCall[Cancellable]] = set()
        self._timer: Timer | None = None

    @contextmanager
    def watching(self, call: Cancellable, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError. Where `is_watched`, cancels it if the gateway is silent."""
        watched = WatchedCall(call)
        if is_watched:
            with self._lock:
                self._watched.add(watched)
                if self._timer is None:
                    self.record_activity()
                    self._set_timer()
        try:
            with quire_errors(self.name):
                yield
        except (QuireError, grpc.FutureCancelledError) as error:
            if watched.is_abandoned:
                raise unreachable(f"{self._address} does not answer any more") from error
            if isinstance(error, grpc.FutureCancelledError):  # only the pool cancels it so
                raise closed("the client") from error
            raise
        finally:
            with self._lock:
                self._watched.discard(watched)

    def close(self) -> None:
        """Cancels all calls and closes the connection."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._channel.close()

    def _set_timer(self) -> None:
        """Sets the timer to when the gateway has been silent for KEEPALIVE_SECONDS. The lock is held."""
        self._timer = Timer(max(0.0, self._last_activity + KEEPALIVE_SECONDS - monotonic()), self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        with self._lock:
            asked = tuple(self._watched)
            if not asked or self._is_closed:
                self._timer = None
                return
        if monotonic() - self._last_activity >= KEEPALIVE_SECONDS:
            self._send_probe(asked)
            self.record_activity()
        with self._lock:
            self._set_timer()

    def _send_probe(self, asked: Sequence[WatchedCall[Cancellable]]) -> None:
        """Cancels the calls if the gateway does not answer ListModels."""
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_no_response(error):
                for watched in asked:
                    watched.is_abandoned = True
                    watched.call.cancel()


class SyncEndpointPool(BaseEndpointPool[SyncEndpoint]):
    """The endpoints of a blocking client."""

    def __init__(self, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        self._closed = Event()
        super().__init__(
            connection, [SyncEndpoint(i, connection, interceptors) for i in range(len(connection.addresses))]
        )

    def call(
        self,
        method: Callable[[InferenceServiceStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"],
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
                with closed_errors(self._closed.is_set):
                    call = method(endpoint.stub).future(
                        request, timeout=retry_policy.begin_call(monotonic()), metadata=metadata
                    )
                with endpoint.watching(call, is_watched=is_watched), _cancelled_on_error(call):
                    response = call.result()
            except QuireError as error:
                self._pause(retry_policy.failed(error, endpoint.index, monotonic()))
            else:
                self.endpoint_list.has_answered = True
                endpoint.record_activity()
                return response

    def start_call(self, resumable: ResumableStream, traceparent: str | None) -> tuple[StreamCall, SyncEndpoint]:
        """Makes the next call of a stream. Raises QuireError where there is no time left for one."""
        endpoint, request, options = self._begin_stream_call(resumable, traceparent)
        with closed_errors(self._closed.is_set):
            if isinstance(request, pb.ResumeRequest):
                return endpoint.stub.Resume(request, **options), endpoint
            return endpoint.stub.StreamGenerate(request, **options), endpoint

    def wait_to_resume(self, resumable: ResumableStream, error: QuireError, endpoint: SyncEndpoint) -> None:
        """Waits until a stream may be resumed after `error`, which is raised where it may not."""
        if self._closed.is_set():
            raise closed("the client") from error
        self._pause(resumable.failed(error, endpoint.index, monotonic()))

    @contextmanager
    def cancel_on_exit(self, name: str | None) -> Iterator[None]:
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
                self.cancel(name)
            raise
        except BaseException:  # such as GeneratorExit, KeyboardInterrupt
            self.cancel(name)
            raise
        finally:
            self._request_ids.discard(name)

    def cancel(self, name: str) -> None:
        """Cancels a request, once. Where that fails within CANCEL_SECONDS, the server's grace period ends it."""
        if name in self._request_ids and not self._closed.is_set():
            self._request_ids.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                self.call(lambda stub: stub.Cancel, request, RetryPolicy(self.endpoint_list, CANCEL_SECONDS))

    def close(self) -> None:
        """Cancels all calls and closes the connections."""
        for name in tuple(self._request_ids):
            self.cancel(name)
        self._closed.set()
        for endpoint in self._endpoints:
            endpoint.close()

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise closed("the client")


@contextmanager
def _cancelled_on_error(call: Cancellable) -> Iterator[None]:
    """Cancels a call where waiting for it is interrupted."""
    try:
        yield
    except BaseException:
        call.cancel()
        raise
