"""A service's gRPC server: options of all servers, health, reflection, signals."""

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from svc_common.addresses import AddressInUse, CannotListen, check_can_listen, join_host_port
from svc_common.errors import QuireError, Reason
from svc_common.interceptors import Context, ErrorInterceptor
from svc_common.signals import ending_signals

__all__ = [
    "INTERNAL_MESSAGE_BYTES",
    "INTERNAL_OPTIONS",
    "LIVENESS",
    "METADATA_BYTES",
    "PUBLIC_MESSAGE_BYTES",
    "AddressInUse",
    "CannotListen",
    "HealthReporter",
    "bind",
    "create_server",
    "enable_reflection",
    "run_until_signal",
]

PUBLIC_MESSAGE_BYTES = 16 * 2**20
"""Of a gateway's answers at most, and of what clients may be allowed to send."""
INTERNAL_MESSAGE_BYTES = 64 * 2**20

METADATA_BYTES = 16 * 2**10
"""Of a call's metadata at most."""

LIVENESS = "liveness"
"""The health service that is SERVING as long as the process responds."""

_MAX_WATCHES = 4096  # of health: about 20 kB each
_MAX_HEALTH_NAME = 256  # characters

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 20 s; by default a server treats more than one ping in five minutes as abuse.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)

INTERNAL_OPTIONS = (
    # Pings of a process that was suspended arrive together. Between Quire's own services that is no abuse.
    ("grpc.http2.max_ping_strikes", 0),
)


def create_server(
    *,
    max_message_bytes: int,
    max_answer_bytes: int | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """A server, not bound yet. Its handlers may raise QuireError; no exception's text reaches a client.

    A larger message than `max_message_bytes` is answered RESOURCE_EXHAUSTED; answers have no more than that, or than
    `max_answer_bytes`. `interceptors` are within the
    error boundary, the first one outermost; `options` are gRPC's own.
    """
    return grpc.aio.server(
        interceptors=[ErrorInterceptor(), *interceptors],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_answer_bytes or max_message_bytes),
            # Else a stale process would share the port and accept part of the connections.
            ("grpc.so_reuseport", 0),
            # By default gRPC rejects metadata from 8 KiB on at random, the more the larger they are.
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES),
            *_KEEPALIVE,
            *options,
        ],
    )


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds the server, before it is started, and returns its port: a free one where `port` is 0.

    Raises AddressInUse or CannotListen.
    """
    # grpc reports only that binding failed, and logs the reason to stderr.
    check_can_listen(host, port)
    address = join_host_port(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise AddressInUse(f"{address} was taken by another process just now") from None


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """With List, which the stock servicer lacks: a call of it would be an internal error. And with bounds on what calls
    of Watch keep in memory, since they need no credential and may last for ever.
    """

    def __init__(self, max_watches: int) -> None:
        super().__init__()
        self._max_watches = max_watches
        self._num_watches: Counter[str] = Counter()  # of each connection

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:  # noqa: N802
        if len(request.service) > _MAX_HEALTH_NAME:
            raise QuireError(Reason.INVALID_FIELD, f"has more than {_MAX_HEALTH_NAME} characters", field="service")
        connection = context.peer()
        num_free = self._max_watches - self._num_watches.total()
        # No connection has more than it leaves to others.
        if self._num_watches[connection] >= num_free:
            raise QuireError(Reason.CAPACITY_EXHAUSTED, "this server's health is watched by too many calls")
        self._num_watches[connection] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches[connection] -= 1
            if not self._num_watches[connection]:
                del self._num_watches[connection]

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: object
    ) -> health_pb2.HealthListResponse:
        answer = health_pb2.HealthCheckResponse
        statuses = {name: answer(status=status) for name, status in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


class HealthReporter:
    """grpc.health.v1 of a server: "" and its services are as `set_serving` sets them, "liveness" is always SERVING."""

    def __init__(self, server: grpc.aio.Server, services: Sequence[str], max_watches: int = _MAX_WATCHES) -> None:
        """`max_watches` bounds the calls that watch it."""
        self._names = ("", *services)
        self._servicer = _HealthServicer(max_watches)
        # The stock servicer starts with "" as SERVING; its own method to change that needs a running loop.
        statuses = self._servicer._server_status
        statuses |= dict.fromkeys(self._names, health_pb2.HealthCheckResponse.NOT_SERVING)
        statuses[LIVENESS] = health_pb2.HealthCheckResponse.SERVING
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def is_serving(self, name: str) -> bool:
        """Whether a health service is SERVING."""
        return bool(self._servicer._server_status.get(name) == health_pb2.HealthCheckResponse.SERVING)

    async def set_serving(self, serving: bool) -> None:
        """Sets whether the server accepts new calls."""
        for name in self._names:
            await self.set_one(name, serving)

    async def set_one(self, name: str, serving: bool) -> None:
        """Sets the status of one health service, which need not be a service of the server."""
        response = health_pb2.HealthCheckResponse
        await self._servicer.set(name, response.SERVING if serving else response.NOT_SERVING)


def enable_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serves the contracts of `services`, health and reflection, under both names that reflection has."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    servicer = reflection.aio.ReflectionServicer(names)
    # v1 has the messages of v1alpha under another name; the stock package has no code for it.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection"):
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])


async def run_until_signal(stop: Callable[[], Awaitable[None]]) -> None:
    """Waits for one of `ending_signals()`, then awaits `stop()`. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    signals = ending_signals()
    for number in signals:
        loop.add_signal_handler(number, signalled.set)
    try:
        await signalled.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
    await stop()
