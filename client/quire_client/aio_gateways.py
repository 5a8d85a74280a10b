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
from quire_client.errors import BROKEN_STREAM, QuireError, closed, is_silence, quire_errors, unreachable
from quire_client.resuming import FAREWELL_SECONDS, PROBE_SECONDS, SILENCE, Course, Recovery, Roster

if TYPE_CHECKING:  # exists in the stubs only
    from quire.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

StreamCall = (
    grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]
    | grpc.aio.UnaryStreamCall[pb.ResumeRequest, pb.ResumeResponse]
)


@dataclass(eq=False, slots=True)
class _Watched:
    """A call that ends where its gateway falls silent."""

    call: grpc.aio.Call
    is_left: bool = False


class AsyncGateway:
    """One gateway, or what one name leads to. `place` is that in the roster."""

    def __init__(self, place: int, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        self.place = place
        self.name = connection.name  # of all: which one it was, no caller can do anything about
        self._address = connection.addresses[place]
        self._connection = connection
        self._interceptors = interceptors
        self._channel: grpc.aio.Channel | None = None
        self._watched: set[_Watched] = set()
        self._heard_at = 0.0
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

    def hear(self) -> None:
        """It said something just now."""
        self._heard_at = monotonic()

    @contextmanager
    def watching(self, call: grpc.aio.Call, *, is_watched: bool) -> Iterator[None]:
        """Turns what `call` raises within into QuireError; where `is_watched`, also the gateway's silence."""
        watched = _Watched(call)
        if is_watched:
            self._watched.add(watched)
            if self._timer is None:
                self.hear()
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
            if watched.is_left:
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
        wait = max(0.0, self._heard_at + SILENCE - monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._watched:
            return
        if monotonic() - self._heard_at >= SILENCE:
            self._probe = asyncio.create_task(self._ask())
        else:
            self._set_timer()

    async def _ask(self) -> None:
        """Ends all calls that are watched if the gateway does not even say what it serves."""
        asked = tuple(self._watched)
        try:
            with quire_errors(self.name):
                metadata = self._connection.metadata(None)
                await self.stub.ListModels(pb.ListModelsRequest(), timeout=PROBE_SECONDS, metadata=metadata)
        except QuireError as error:
            if is_silence(error):
                for watched in asked:
                    watched.is_left = True
                    watched.call.cancel()
        self.hear()
        self._set_timer()


class AsyncGateways:
    """Where the calls of one client go."""

    def __init__(self, connection: Connection, interceptors: Sequence[grpc.aio.ClientInterceptor]) -> None:
        self.is_closed = False
        self._connection = connection
        self._gateways = [AsyncGateway(i, connection, interceptors) for i in range(len(connection.addresses))]
        self.roster = Roster(len(self._gateways))
        self._names: set[str] = set()

    async def call(
        self,
        method: Callable[["InferenceServiceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]],
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
                call = method(gateway.stub)(request, timeout=recovery.begin_call(monotonic()), metadata=metadata)
                with gateway.watching(call, is_watched=is_watched):
                    response = await call
            except QuireError as error:
                await self._pause(recovery.failed(error, gateway.place, monotonic()))
            else:
                self.roster.has_answered = True
                gateway.hear()
                return response

    def begin(self, course: Course, traceparent: str | None) -> tuple[StreamCall, AsyncGateway]:
        """Makes the next call of a stream. Raises QuireError where there is no time left for one."""
        request, timeout = course.begin_call(monotonic())
        gateway = self._gateways[self.roster.current]
        metadata = self._connection.metadata(traceparent)
        if isinstance(request, pb.ResumeRequest):
            return gateway.stub.Resume(request, timeout=timeout, metadata=metadata), gateway
        return gateway.stub.StreamGenerate(request, timeout=timeout, metadata=metadata), gateway

    async def go_on(self, course: Course, error: QuireError, gateway: AsyncGateway) -> None:
        """Waits until a stream may be taken up again after `error`, which is raised where it may not."""
        await self._pause(course.failed(error, gateway.place, monotonic()))

    @asynccontextmanager
    async def holding(self, name: str | None) -> AsyncIterator[None]:
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
                await self.cancel(name)
            raise
        except BaseException:  # left: by the end of a generator, a cancelled task, an interrupt
            await self.cancel(name)
            raise
        finally:
            self._names.discard(name)

    async def cancel(self, name: str) -> None:
        """Cancels a request that is held, as far as that can be done in short time; else the server's grace ends it."""
        if name in self._names and not self.is_closed:
            self._names.discard(name)
            with suppress(QuireError):
                request = pb.CancelRequest(request_id=name)
                await self.call(lambda stub: stub.Cancel, request, Recovery(self.roster, FAREWELL_SECONDS))

    async def close(self) -> None:
        """Ends all calls and closes the connections."""
        await asyncio.gather(*map(self.cancel, tuple(self._names)))
        self.is_closed = True
        await asyncio.gather(*(gateway.close() for gateway in self._gateways))

    async def _pause(self, seconds: float) -> None:
        if seconds and not self.is_closed:
            await asyncio.sleep(seconds)
        if self.is_closed:
            raise closed("the client")
