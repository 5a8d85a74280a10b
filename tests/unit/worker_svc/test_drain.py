"""Draining over a real channel: the open stream continues, and no other stream is accepted."""

import asyncio

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Stream, Worker, new_sequence, scheduled


async def test_a_worker_without_a_stream_is_drained_at_once(worker: Worker) -> None:
    await worker.service.drain()
    assert (await worker.stub.Describe(pb.DescribeRequest())).is_draining


async def test_a_stream_runs_on_while_its_worker_is_drained_and_ends_the_drain(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.receive()
    assert not (await worker.stub.Describe(pb.DescribeRequest())).is_draining
    drained = asyncio.create_task(worker.service.drain())
    while not (await worker.stub.Describe(pb.DescribeRequest())).is_draining:
        pass
    await stream.send(2, scheduled=scheduled((1, 5, 1)))
    assert len((await stream.receive()).result.token_ids) == 1
    assert not drained.done()
    await stream.call.done_writing()
    await asyncio.wait_for(drained, 60)


async def test_a_stream_whose_scheduler_is_gone_ends_the_drain(worker: Worker) -> None:
    stream = await worker.open()
    drained = asyncio.create_task(worker.service.drain())
    stream.call.cancel()
    await asyncio.wait_for(drained, 60)


async def test_a_draining_worker_accepts_no_other_stream(worker: Worker) -> None:
    running = await worker.open()
    drained = asyncio.create_task(worker.service.drain())
    while not (await worker.stub.Describe(pb.DescribeRequest())).is_draining:
        pass
    late = Stream(worker.stub.Step(), 2, 1)
    await late.send(0)
    code, _ = await late.refusal()
    assert code is grpc.StatusCode.UNAVAILABLE
    await running.send(1)
    assert (await running.receive()).step_id == 1
    drained.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drained
