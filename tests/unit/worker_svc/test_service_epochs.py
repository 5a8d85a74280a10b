"""Which epochs of step streams the service accepts."""

import time

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Worker

DAY = 86400 * 10**6  # microseconds


async def test_describe_returns_the_highest_epoch(worker: Worker) -> None:
    await worker.open(epoch=7)
    assert (await worker.stub.Describe(pb.DescribeRequest())).epoch == 7


@pytest.mark.parametrize("epoch", [2**53, 2**64 - 1])
async def test_an_epoch_that_redis_cannot_compute_with_is_refused(worker: Worker, epoch: int) -> None:
    await worker.open(epoch=7)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.open(epoch=epoch)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "below 2^53" in str(caught.value.details())
    assert (await worker.stub.Describe(pb.DescribeRequest())).epoch == 7
    await worker.open(epoch=8)


async def test_an_epoch_far_ahead_of_the_clock_does_not_keep_leaders_out(worker: Worker) -> None:
    now = time.time_ns() // 1000
    await worker.open(epoch=now)
    await worker.open(epoch=now + 2 * DAY)
    assert (await worker.stub.Describe(pb.DescribeRequest())).epoch == now + 2 * DAY
    for refused in ({"epoch": now - 1}, {"epoch": now, "generation": 1}, {"epoch": now + 2 * DAY - 1}):
        with pytest.raises(grpc.aio.AioRpcError, match="after one of epoch"):
            await worker.open(**refused)  # fenced as before, each in its order
    await worker.open(epoch=now + 1)
    assert (await worker.stub.Describe(pb.DescribeRequest())).epoch == now + 1


async def test_leaders_whose_clock_is_ahead_are_fenced_in_their_order(worker: Worker) -> None:
    far = time.time_ns() // 1000 + 10 * DAY
    for epoch in (far, far + 5):
        await worker.open(epoch=epoch)
    with pytest.raises(grpc.aio.AioRpcError, match="after one of epoch"):
        await worker.open(epoch=far + 4)
