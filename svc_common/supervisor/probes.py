"""Probes of roles. A probe returns whether its role is ready; it never raises."""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Awaitable, Callable

import grpc
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from svc_common.channels import internal_channel
from svc_common.supervisor.addresses import UNIX_SCHEME

Probe = Callable[[], Awaitable[bool]]

_TIMEOUT = 2.0


def answers_grpc(address: str, service: str = "") -> Probe:
    """The gRPC health service answers SERVING, for the server or one of its services."""

    async def probe() -> bool:
        async with internal_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            try:
                response = await check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT)
            except grpc.aio.AioRpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, tls: ssl.SSLContext | None) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._path)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock)


def answers_http(address: str, path: str, *, has_tls: bool = False) -> Probe:
    """The server at `host:port`, or `unix:` and the path of its socket, answers 200 on a path.

    Its certificate, if it has TLS, is for other names, and is not checked.
    """

    def connect() -> http.client.HTTPConnection:
        tls = _unchecked_tls() if has_tls else None
        if address.startswith(UNIX_SCHEME):
            return _UnixConnection(address.removeprefix(UNIX_SCHEME), tls)
        if tls is None:
            return http.client.HTTPConnection(address, timeout=_TIMEOUT)
        return http.client.HTTPSConnection(address, timeout=_TIMEOUT, context=tls)

    def ask() -> bool:
        connection = connect()
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    async def probe() -> bool:
        return await asyncio.to_thread(ask)

    return probe


def _unchecked_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def answers_redis(url: str) -> Probe:
    """Redis answers PING, which it does once its data is loaded."""

    async def probe() -> bool:
        client = redis.asyncio.from_url(
            url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT, retry=Retry(NoBackoff(), 0)
        )
        try:
            await client.ping()
        except RedisError:
            return False
        finally:
            await client.aclose()
        return True

    return probe
