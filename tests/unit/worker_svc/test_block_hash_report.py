"""The block-hash report over a real channel, for a scheduler that opens a stream after another one."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Worker, new_sequence, scheduled, small_replica
from worker_svc.executor import SampleHandle
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.instance import ModelInstance

LABELS = {3: b"three" * 6 + b"..", 4: b"four" * 8}


@pytest.fixture
def replica(tiny_llama: Path) -> ModelInstance:
    """A replica whose blocks keep their hashes for the whole test."""
    return small_replica(tiny_llama)


def columns(block_hashes: dict[int, bytes]) -> pb.BlockHashes:
    return pb.BlockHashes(block_ids=block_hashes.keys(), hashes=block_hashes.values())


async def report(worker: Worker, epoch: int = 1, generation: int = 1) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The hashes of the device and of the host."""
    held = await worker.stub.ReportBlockHashes(pb.ReportBlockHashesRequest(epoch=epoch, generation=generation))
    device, host = (dict(zip(tier.block_ids, tier.hashes, strict=True)) for tier in (held.device, held.host))
    return device, host


async def test_a_new_worker_has_no_hashes(worker: Worker) -> None:
    await worker.open()
    assert await report(worker) == ({}, {})


async def test_hashes_are_reported_until_their_blocks_are_written(worker: Worker) -> None:
    stream = await worker.open()
    await stream.send(1, block_hashes=columns(LABELS), host_block_hashes=columns({7: b"host"}))
    await stream.receive()
    assert await report(worker) == (LABELS, {7: b"host"})
    await stream.send(2, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 3)))
    await stream.send(3, swap_out=pb.BlockCopies(sources=[4], destinations=[7]))
    await stream.receive()
    await stream.receive()
    assert await report(worker) == ({4: LABELS[4]}, {})


async def test_a_later_scheduler_gets_the_hashes(worker: Worker) -> None:
    first = await worker.open(epoch=1)
    await first.send(1, block_hashes=columns(LABELS))
    await first.receive()
    first.call.cancel()
    await worker.open(epoch=2, generation=1)
    assert await report(worker, epoch=2) == (LABELS, {})


async def test_the_inventory_is_exact_behind_steps_that_a_superseded_stream_left(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, launching, let_go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    launch = HostThreadExecutor.launch

    def held(executor: HostThreadExecutor, *arguments: Any) -> SampleHandle:
        loop.call_soon_threadsafe(launching.set)
        asyncio.run_coroutine_threadsafe(let_go.wait(), loop).result(timeout=60)
        return launch(executor, *arguments)

    old = await worker.open(generation=1)
    await old.send(1, block_hashes=columns(LABELS))
    await old.receive()
    monkeypatch.setattr(HostThreadExecutor, "launch", held)
    await old.send(2, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 3)))
    await old.send(3, new_sequences=[new_sequence(2)], scheduled=scheduled((2, 0, 5, 4)))
    await launching.wait()
    opening = asyncio.create_task(worker.open(generation=2))
    code, _ = await old.refusal()  # so the new stream stands in its place, behind the step that is being launched
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    asked = asyncio.create_task(report(worker, generation=2))
    let_go.set()
    await opening
    # Block 3 was written, block 4 was not: the step that should have written it was dropped.
    assert await asked == await report(worker, generation=2) == ({4: LABELS[4]}, {})


@pytest.mark.parametrize("term", [(1, 2), (4, 2), (5, 1), (5, 3), (6, 1)])
async def test_only_the_open_stream_may_ask(term: tuple[int, int], worker: Worker) -> None:
    await worker.open(epoch=1, generation=2)
    await worker.open(epoch=5, generation=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await report(worker, *term)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"epoch {term[0]}, generation {term[1]}" in str(caught.value.details())


async def test_a_report_needs_a_stream(worker: Worker) -> None:
    stream = await worker.open()
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await report(worker)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("field", ["block_hashes", "host_block_hashes"])
async def test_hashes_of_unknown_blocks_end_the_stream(field: str, worker: Worker) -> None:
    stream = await worker.open()
    fields: dict[str, Any] = {field: pb.BlockHashes(block_ids=[1], hashes=[b"1", b"2"])}
    await stream.send(1, **fields)
    code, details = await stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "block hashes" in details
