"""Which epochs of step streams the service accepts."""

import time

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Stream, Worker, new_sequence, scheduled

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


async def order(worker: Worker, epoch: int, worker_epoch: int) -> None:
    await worker.stub.Restart(pb.RestartRequest(epoch=epoch, worker_epoch=worker_epoch))


async def until_closed(worker: Worker, stream: Stream) -> None:
    """Ends a stream. The worker answers another call afterwards."""
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF


async def test_a_worker_whose_epoch_is_outside_the_window_restarts_when_a_leader_orders_it(worker: Worker) -> None:
    now = time.time_ns() // 1000
    await until_closed(worker, await worker.open(epoch=now + 2 * DAY))
    await order(worker, now, now + 2 * DAY)
    assert worker.service.restart_ordered.is_set()


async def test_a_worker_whose_clock_is_ahead_restarts_when_a_leader_orders_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns() // 1000
    monkeypatch.setattr("worker_svc.service._clock", lambda: now + 10 * DAY)
    await until_closed(worker, await worker.open(epoch=now + 9 * DAY))
    with pytest.raises(grpc.aio.AioRpcError, match="after one of epoch"):
        await worker.open(epoch=now)
    await order(worker, now, now + 9 * DAY)
    assert worker.service.restart_ordered.is_set()


@pytest.mark.parametrize(
    ("epoch", "worker_epoch", "why"),
    [
        pytest.param(2 * DAY, 4 * DAY, "ahead of this worker's clock", id="the leader's clock is ahead"),
        pytest.param(2**53, 4 * DAY, "not below 2\\^53", id="an epoch that no leader has"),
        pytest.param(10, 4 * DAY + 1, "this worker's epoch is", id="another epoch than the worker's"),
        pytest.param(10, 0, "this worker's epoch is", id="an epoch that it does not have any more"),
        pytest.param(-1, 4 * DAY, "has followed", id="an earlier leader"),
    ],
)
async def test_other_orders_to_restart_are_refused(worker: Worker, epoch: int, worker_epoch: int, why: str) -> None:
    now = time.time_ns() // 1000
    await until_closed(worker, await worker.open(epoch=now))
    await until_closed(worker, await worker.open(epoch=now + 4 * DAY))
    with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
        await order(worker, epoch if epoch == 2**53 else now + epoch, now + worker_epoch)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not worker.service.restart_ordered.is_set()


@pytest.mark.parametrize("ahead", [1, DAY - 60 * 10**6])
async def test_an_earlier_leader_cannot_restart_a_worker_that_a_later_one_has_used(worker: Worker, ahead: int) -> None:
    now = time.time_ns() // 1000
    await until_closed(worker, await worker.open(epoch=now + ahead))
    with pytest.raises(grpc.aio.AioRpcError, match="not more than a day ahead"):
        await order(worker, now, now + ahead)
    assert not worker.service.restart_ordered.is_set()


async def test_a_worker_that_runs_steps_does_not_restart(worker: Worker) -> None:
    now = time.time_ns() // 1000
    stream = await worker.open(epoch=now + 2 * DAY)
    with pytest.raises(grpc.aio.AioRpcError, match="is open"):
        await order(worker, now, now + 2 * DAY)
    assert not worker.service.restart_ordered.is_set()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    assert len((await stream.receive()).result.token_ids) == 1
