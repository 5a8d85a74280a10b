"""The client of one worker's service."""

import grpc

from quire.worker.v1 import worker_pb2 as worker_v1
from quire.worker.v1.worker_pb2_grpc import WorkerServiceStub

StepCall = grpc.aio.StreamStreamCall[worker_v1.StepRequest, worker_v1.StepResponse]


class WorkerClient:
    """Calls over one channel, with timeouts in seconds. Every call may raise AioRpcError."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        """`metadata` is that of each call."""
        self._stub = WorkerServiceStub(channel)
        self._metadata = metadata

    async def describe(self, timeout: float) -> worker_v1.DescribeResponse:
        """The worker's description now."""
        return await self._stub.Describe(worker_v1.DescribeRequest(), timeout=timeout, metadata=self._metadata)

    def step(self) -> StepCall:
        """A new step stream."""
        call: StepCall = self._stub.Step(metadata=self._metadata)
        return call

    async def block_hashes(self, epoch: int, generation: int, timeout: float) -> worker_v1.ReportBlockHashesResponse:
        """The hashes of the worker's blocks, for the scheduler that opened the stream of this generation."""
        request = worker_v1.ReportBlockHashesRequest(epoch=epoch, generation=generation)
        return await self._stub.ReportBlockHashes(request, timeout=timeout, metadata=self._metadata)

    async def restart(self, epoch: int, worker_epoch: int, timeout: float) -> None:
        """Orders a worker that has described `worker_epoch` to end its process, as the leader of term `epoch`."""
        request = worker_v1.RestartRequest(epoch=epoch, worker_epoch=worker_epoch)
        await self._stub.Restart(request, timeout=timeout, metadata=self._metadata)

    async def start_profile(self, timeout: float) -> worker_v1.StartProfileResponse:
        return await self._stub.StartProfile(worker_v1.StartProfileRequest(), timeout=timeout, metadata=self._metadata)

    async def stop_profile(self, timeout: float) -> worker_v1.StopProfileResponse:
        return await self._stub.StopProfile(worker_v1.StopProfileRequest(), timeout=timeout, metadata=self._metadata)
