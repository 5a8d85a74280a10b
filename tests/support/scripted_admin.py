"""An admin service with scripted responses, for the commands of the `quire` command line."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from quire.admin.v1 import admin_pb2 as pb
from quire.admin.v1 import admin_pb2_grpc as pb_grpc


@dataclass
class ScriptedAdmin(pb_grpc.AdminServiceServicer):
    """Sends scripted responses, and records requests."""

    requests: list[Any] = field(default_factory=list)
    explanation: pb.ExplainResponse | None = None
    listed: pb.ListRequestsResponse = field(default_factory=pb.ListRequestsResponse)
    resets: list[pb.WorkerCacheReset] = field(default_factory=list)
    profiles: list[pb.WorkerProfile] = field(default_factory=list)

    async def Explain(
        self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExplainResponse:
        self.requests.append(request)
        if self.explanation is None:
            status = status_pb2.Status(code=5, message="no such request is live")
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NOT_FOUND", domain="quire"))
            metadata = (("grpc-status-details-bin", status.SerializeToString()),)
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request is live", trailing_metadata=metadata)
        return self.explanation

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListRequestsResponse:
        self.requests.append(request)
        return self.listed

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ResetPrefixCacheResponse:
        self.requests.append(request)
        return pb.ResetPrefixCacheResponse(workers=self.resets)

    async def StartProfile(
        self, request: pb.StartProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StartProfileResponse:
        self.requests.append(request)
        return pb.StartProfileResponse(workers=self.profiles)

    async def StopProfile(
        self, request: pb.StopProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StopProfileResponse:
        self.requests.append(request)
        return pb.StopProfileResponse(workers=self.profiles)


@asynccontextmanager
async def scripted_admin() -> AsyncIterator[tuple[ScriptedAdmin, str]]:
    """A service and its address."""
    service = ScriptedAdmin()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_AdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield service, f"127.0.0.1:{port}"
    await server.stop(None)
