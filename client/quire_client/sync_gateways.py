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
from quire_client.errors import BROKEN_STREAM, QuireError, closed, is_silence, quire_errors, unreachable
from quire_client.resuming import FAREWELL_SECONDS, PROBE_SECONDS, SILENCE, Course, Recovery, Roster

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
class _Watched:
    """A call that ends where its gateway falls silent."""

    call: Cancellable
    is_left: bool = False


class Gateway:
    """One gateway, or what one name leads to. `place` is that in the roster."""

    def __init__(self, place: int, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        self.place = place
        self.name = connection.name  # of all: which one it was, no caller can do anything about
        self._address = to = connection.addresses[place]
        self._connection = connection
        options = channel_options(to)
        self._channel = (
            grpc.insecure_channel(to, options)
            if connection.credentials is None
            else grpc.secure_channel(to, connection.credentials, options)
        )
        self.stub = InferenceServiceStub(grpc.intercept_channel(self._channel, *interceptors))
        self._lock = Lock()  # of what is watched, and of the timer
        self._watched: set[_Watched] = set()
        self._heard_at = 0.0
        self._timer: Timer | None = None
        self._is_closed = False

    def hear(self) -> None:
        """It said something just now."""
        self._heard_at = monotonic()

    @contextmanager
    def watching(self, call: Cancellable, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError; where `is_watched`, also the gateway's silence."""
        watched = _Watched(call)
        if is_watched:
            with self._lock:
                self._watched.add(watched)
                if self._timer is None:
                    self.hear()
                    self._set_timer()
        try:
            with quire_errors(self.name):
                yield
        except (QuireError, grpc.FutureCancelledError) as error:
            if watched.is_left:
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
        self._timer = Timer(max(0.0, self._heard_at + SILENCE - monotonic()), self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        with self._lock:
            asked = tuple(self._watched)
            if not asked or self._is_closed:
                self._timer = None
                return
        if monotonic() - self._heard_at >= SILENCE:
            self._ask(asked)
            self.hear()
        with self._lock:
            self._set_timer()

    def _ask(self, asked: Sequence[_Watched]) -> None:
        """Ends the calls if the gateway does not even say what it serves."""
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_silence(error):
                for watched in asked:
                    watched.is_left = True
                    watched.call.cancel()


class Gateways:
    """Where the calls of one client go."""

    def __init__(self, connection: Connection, interceptors: Sequence[Interceptor]) -> None:
        self._closed = Event()
        self._connection = connection
        self._gateways = [Gateway(i, connection, interceptors) for i in range(len(connection.addresses))]
        self.roster = Roster(len(self._gateways))
        self._names: set[str] = set()

    def call(
        self,
        method: Callable[[InferenceServiceStub], "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]"],
        request: RequestT,
        recovery: Recovery,
        traceparent: str | None = None,
    ) -> ResponseT:
        """Makes a call that has one answer, as often as `recovery` has it. Raises QuireError."""
        metadata = self._connection.metadata(traceparent)
        is_watched = recovery.patience is not None
        while True:
            gateway = self._gateways[self.roster.current]
            try:
                call = method(gateway.stub).future(request, timeout=recovery.begin_call(monotonic()), metadata=metadata)
                with gateway.watching(call, is_watched=is_watched), _ended(call):
                    response = call.result()
            except QuireError as error:
                self._pause(recovery.failed(error, gateway.place, monotonic()))
            else:
                self.roster.has_answered = True
                gateway.hear()
                return response

    def begin(self, course: Course, traceparent: str | None) -> tuple[StreamCall, Gateway]:
        """Makes the next call of a stream. Raises QuireError where there is no time left for one."""
        request, timeout = course.begin_call(monotonic())
        gateway = self._gateways[self.roster.current]
        metadata = self._connection.metadata(traceparent)
        if isinstance(request, pb.ResumeRequest):
            return gateway.stub.Resume(request, timeout=timeout, metadata=metadata), gateway
        return gateway.stub.StreamGenerate(request, timeout=timeout, metadata=metadata), gateway

    def go_on(self, course: Course, error: QuireError, gateway: Gateway) -> None:
        """Waits until a stream may be taken up again after `error`, which is raised where it may not."""
        self._pause(course.failed(error, gateway.place, monotonic()))

    @contextmanager
    def holding(self, name: str | None) -> Iterator[None]:
        """Cancels the request of this name where it is left before its end: the name would keep it running.

        Not where the server has ended it, and not one without such a name.
        """
        if name is None:
            yield
            return
        self._names.add(name)
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
            self._names.discard(name)

    def cancel(self, name: str) -> None:
        """Cancels a request that is held, as far as that can be done in short time; else the server's grace ends it."""
        if name in self._names and not self._closed.is_set():
            self._names.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                self.call(lambda stub: stub.Cancel, request, Recovery(self.roster, FAREWELL_SECONDS))

    def close(self) -> None:
        """Ends all calls and closes the connections."""
        for name in tuple(self._names):
            self.cancel(name)
        self._closed.set()
        for gateway in self._gateways:
            gateway.close()

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
