"""Calls to inner ports, of every method that there is, with the credential of any role or none."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.admin.v1 import admin_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from svc_common.identity import pair_token, token_metadata
from svc_common.service_roles import ServiceRole

Metadata = tuple[tuple[str, str], ...]
TIMEOUT = 60.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How a call ends where the server rejects the connection. With TLS 1.3 that may be after the call is sent."""

_REFLECTION = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)


def _methods(contract: FileDescriptor) -> tuple[str, ...]:
    return tuple(
        f"/{service.full_name}/{method.name}"
        for service in contract.services_by_name.values()
        for method in service.methods
    )


METHODS: Mapping[str, tuple[str, ...]] = {
    "schedulers": (*_methods(scheduler_pb2.DESCRIPTOR), *_REFLECTION),
    "scheduler_admin": (*_methods(admin_pb2.DESCRIPTOR), *_REFLECTION),
    "workers": (*_methods(worker_pb2.DESCRIPTOR), *_REFLECTION),
}
"""Every method but health checks of each inner port, by its name in the supervisor's state."""


def token(secret: bytes, caller: ServiceRole, callee: ServiceRole) -> Metadata:
    """The credential of a caller for a callee."""
    return token_metadata(caller, pair_token(secret, caller, callee))


async def status(channel: grpc.aio.Channel, method: str, metadata: Metadata = ()) -> tuple[grpc.StatusCode, str]:
    """The status of a call that sends no message. One that is let through is another status than of a credential."""
    open_call: Any = channel.stream_stream(method)
    call = open_call(iter(()), metadata=metadata, timeout=TIMEOUT)
    # gRPC has the status of a call once its messages are read. An error of reading is that of the status.
    await asyncio.gather(_read_all(call), return_exceptions=True)
    return await call.code(), await call.details()


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass


async def is_live(channel: grpc.aio.Channel) -> bool:
    """Whether the port answers a health check without a credential."""
    check = health_pb2_grpc.HealthStub(channel).Check
    response = await check(health_pb2.HealthCheckRequest(service="liveness"), timeout=TIMEOUT)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
