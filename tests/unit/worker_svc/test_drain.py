"""Draining over a real channel: what the scheduler has here continues, with the next leader if need be."""

import asyncio

import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Worker, new_sequence, scheduled


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


async def test_the_next_leader_may_run_on_what_a_draining_worker_has(worker: Worker) -> None:
    first = await worker.open()
    await first.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await first.receive()
    drained = asyncio.create_task(worker.service.drain())
    while not (await worker.stub.Describe(pb.DescribeRequest())).is_draining:
        pass
    first.call.cancel()
    second = await worker.open(epoch=2)
    await second.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    assert len((await second.receive()).result.token_ids) == 1
    assert not drained.done()
    await second.send(2, finished_ids=[1])
    await second.receive()
    second.call.cancel()
    await asyncio.wait_for(drained, 60)


async def test_a_draining_worker_does_not_wait_long_for_the_next_leader(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_svc.service._TAKEOVER_SECONDS", 0.01)
    stream = await worker.open()
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.receive()
    drained = asyncio.create_task(worker.service.drain())
    while not (await worker.stub.Describe(pb.DescribeRequest())).is_draining:
        pass
    stream.call.cancel()
    await asyncio.wait_for(drained, 60)
