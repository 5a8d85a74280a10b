"""Calls within one process end as calls over a network do."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from quire.worker.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from quire_offline.local_channel import LocalServer
from scheduler_svc.worker_client import WorkerClient
from svc_common.errors import QuireError, Reason


class Scripted(WorkerServiceServicer):
    """Answers each step with its number, and fails for some."""

    def __init__(self) -> None:
        self.received: list[pb.StepRequest] = []
        self.has_ended = asyncio.Event()

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeResponse:
        raise QuireError(Reason.MODEL_NOT_READY, "loading")

    async def StopProfile(self, request: pb.StopProfileRequest, context: object) -> pb.StopProfileResponse:
        await asyncio.sleep(60)
        return pb.StopProfileResponse()

    async def StartProfile(self, request: pb.StartProfileRequest, context: object) -> pb.StartProfileResponse:
        raise NotImplementedError

    async def Restart(self, request: pb.RestartRequest, context: object) -> pb.RestartResponse:
        raise NotImplementedError

    async def ReportBlockHashes(
        self, request: pb.ReportBlockHashesRequest, context: object
    ) -> pb.ReportBlockHashesResponse:
        return pb.ReportBlockHashesResponse(device=pb.BlockHashes(block_ids=[request.generation]))

    async def Step(
        self, requests: AsyncIterator[pb.StepRequest], context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.StepResponse]:
        try:
            async for request in requests:
                self.received.append(request)
                if request.step_id == 7:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "seven")
                if request.step_id == 8:
                    raise ValueError("a bug")
                yield pb.StepResponse(step_id=request.step_id)
                if request.step_id == 9:
                    return
        finally:
            self.has_ended.set()


@pytest.fixture
def servicer() -> Scripted:
    return Scripted()


@pytest.fixture
def channel(servicer: Scripted) -> grpc.aio.Channel:
    server = LocalServer()
    add_WorkerServiceServicer_to_server(servicer, server.registry)
    return server.channel("anywhere")


@pytest.fixture
def worker(channel: grpc.aio.Channel) -> WorkerClient:
    return WorkerClient(channel, ())


async def test_messages_are_copies(worker: WorkerClient, servicer: Scripted) -> None:
    call = worker.step()
    request = pb.StepRequest(step_id=1)
    await call.write(request)
    request.step_id = 5
    assert await call.read() == pb.StepResponse(step_id=1)
    assert servicer.received[0].step_id == 1
    call.cancel()


async def test_a_stream_ends(worker: WorkerClient) -> None:
    call = worker.step()
    await call.write(pb.StepRequest(step_id=9))
    assert await call.read() == pb.StepResponse(step_id=9)
    assert await call.read() is grpc.aio.EOF
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(pb.StepRequest())


@pytest.mark.parametrize(
    ("step_id", "code", "details"),
    [(7, grpc.StatusCode.FAILED_PRECONDITION, "seven"), (8, grpc.StatusCode.INTERNAL, "internal error")],
)
async def test_a_stream_fails_with_a_status(
    step_id: int, code: grpc.StatusCode, details: str, worker: WorkerClient
) -> None:
    call = worker.step()
    await call.write(pb.StepRequest(step_id=step_id))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert (raised.value.code(), raised.value.details(), await call.details()) == (code, details, details)


async def test_a_channel_that_closes_ends_its_streams(
    channel: grpc.aio.Channel, worker: WorkerClient, servicer: Scripted
) -> None:
    call = worker.step()
    await call.write(pb.StepRequest(step_id=1))
    await call.read()
    async with channel:
        pass
    await asyncio.wait_for(servicer.has_ended.wait(), 10)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


async def test_a_call_is_answered(worker: WorkerClient) -> None:
    assert (await worker.block_hashes(epoch=1, generation=5, timeout=5)).device.block_ids == [5]


async def test_a_call_fails_with_a_status(worker: WorkerClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await worker.describe(timeout=5)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNAVAILABLE, "loading")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await worker.stop_profile(timeout=0.01)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
