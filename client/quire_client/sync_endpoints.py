"""The gateways of the blocking client: a channel each, calls that move on, and an eye on those that fall silent."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Timer
from time import monotonic
from typing import Protocol, TypeVar

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

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

Interceptor = grpc.UnaryUnaryClientInterceptor | grpc.UnaryStreamClientInterceptor


class Cancellable(Protocol):
    """A call that runs."""

    def cancel(self) -> bool: ...


class StreamCall(Cancellable, Protocol):
    """A running StreamGenerate or Resume."""

    def __iter__(self) -> Iterator[pb.StreamGenerateResponse | pb.ResumeResponse]: ...


@dataclass(eq=False, slots=True)
class _WatchedCall:
    """A call that ends where its gateway falls silent."""

    call: Cancellable
    is_abandoned: bool = False


class SyncEndpoint:
    """One gateway, or what one name leads to. `index` is that in the roster."""

    def __init__(self, index: int, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        self.index = index
        self.name = connection.name  # of all: which one it was, no caller can do anything about
        self._address = to = connection.addresses[index]
        self._connection = connection
        options = channel_options(to)
        self._channel = (
            grpc.insecure_channel(to, options)
            if connection.credentials is None
            else grpc.secure_channel(to, connection.credentials, options)
        )
        self.stub = InferenceServiceStub(grpc.intercept_channel(self._channel, *interceptors))
        self._lock = Lock()  # of what is watched, and of the timer
        self._watched: set[_WatchedCall] = set()
        self._last_activity = 0.0
        self._timer: Timer | None = None
        self._is_closed = False

    def record_activity(self) -> None:
        """It said something just now."""
        self._last_activity = monotonic()

    @contextmanager
    def watching(self, call: Cancellable, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError; where `is_watched`, also the gateway's silence."""
        watched = _WatchedCall(call)
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
            if isinstance(error, grpc.FutureCancelledError):  # by nobody else: who waits for it holds it
                raise closed("the client") from error
            raise
        finally:
            with self._lock:
                self._watched.discard(watched)

    def close(self) -> None:
        """Ends all calls and closes the connection."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._channel.close()

    def _set_timer(self) -> None:
        """Looks again when the gateway may have been silent for too long. The lock is held."""
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

    def _send_probe(self, asked: Sequence[_WatchedCall]) -> None:
        """Ends the calls if the gateway does not even say what it serves."""
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_no_response(error):
                for watched in asked:
                    watched.is_abandoned = True
                    watched.call.cancel()


class SyncEndpointPool:
    """Where the calls of one client go."""

    def __init__(self, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        self._closed = Event()
        self._connection = connection
        self._endpoints = [SyncEndpoint(i, connection, interceptors) for i in range(len(connection.addresses))]
        self.endpoint_list = EndpointList(len(self._endpoints))
        self._request_ids: set[str] = set()

    def call(
        self,
        method: Callable[[InferenceServiceStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"],
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
                call = method(endpoint.stub).future(
                    request, timeout=retry_policy.begin_call(monotonic()), metadata=metadata
                )
                with endpoint.watching(call, is_watched=is_watched), _ended(call):
                    response = call.result()
            except QuireError as error:
                self._pause(retry_policy.failed(error, endpoint.index, monotonic()))
            else:
                self.endpoint_list.has_answered = True
                endpoint.record_activity()
                return response

    def start_call(self, resumable: ResumableStream, traceparent: str | None) -> tuple[StreamCall, SyncEndpoint]:
        """Makes the next call of a stream. Raises QuireError where there is no time left for one."""
        request, timeout = resumable.begin_call(monotonic())
        endpoint = self._endpoints[self.endpoint_list.current]
        metadata = self._connection.metadata(traceparent)
        if isinstance(request, pb.ResumeRequest):
            return endpoint.stub.Resume(request, timeout=timeout, metadata=metadata), endpoint
        return endpoint.stub.StreamGenerate(request, timeout=timeout, metadata=metadata), endpoint

    def wait_to_resume(self, resumable: ResumableStream, error: QuireError, endpoint: SyncEndpoint) -> None:
        """Waits until a stream may be taken up again after `error`, which is raised where it may not."""
        self._pause(resumable.failed(error, endpoint.index, monotonic()))

    @contextmanager
    def cancel_on_exit(self, name: str | None) -> Iterator[None]:
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
                self.cancel(name)
            raise
        except BaseException:  # left: by the end of a generator, an interrupt
            self.cancel(name)
            raise
        finally:
            self._request_ids.discard(name)

    def cancel(self, name: str) -> None:
        """Cancels a request that is held, as far as that can be done in short time; else the server's grace ends it."""
        if name in self._request_ids and not self._closed.is_set():
            self._request_ids.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                self.call(lambda stub: stub.Cancel, request, RetryPolicy(self.endpoint_list, CANCEL_SECONDS))

    def close(self) -> None:
        """Ends all calls and closes the connections."""
        for name in tuple(self._request_ids):
            self.cancel(name)
        self._closed.set()
        for endpoint in self._endpoints:
            endpoint.close()

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise closed("the client")


@contextmanager
def _ended(call: Cancellable) -> Iterator[None]:
    """Ends a call with whoever waits for it, as by an interrupt."""
    try:
        yield
    except BaseException:
        call.cancel()
        raise
