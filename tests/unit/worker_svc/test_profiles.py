"""Profiles of a worker's steps: where they are written, and when they are refused."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import grpc
import pytest

from quire.worker.v1 import worker_pb2 as pb
from worker_service import Worker, new_sequence, scheduled, serving
from worker_svc.device_thread import DeviceThread
from worker_svc.instance import ModelInstance
from worker_svc.profiles import ProfileRefused, Profiles


@pytest.fixture
async def profiled(tmp_path: Path, replica: ModelInstance) -> AsyncIterator[Worker]:
    """A ready worker whose operator has set QUIRE_PROFILE_DIR to a directory that does not exist yet."""
    async with serving(tmp_path / "traces") as worker:
        worker.service.serve(replica)
        yield worker


async def test_a_profile_has_the_operators_of_a_step(profiled: Worker, tmp_path: Path) -> None:
    stream = await profiled.open()
    await profiled.stub.StartProfile(pb.StartProfileRequest())
    await stream.send(1, new_sequences=[new_sequence(1)], scheduled=scheduled((1, 0, 5, 0)))
    await stream.receive()
    path = Path((await profiled.stub.StopProfile(pb.StopProfileRequest())).path)
    assert path.parent == tmp_path / "traces"
    with gzip.open(path, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)


async def test_a_profile_is_refused_without_a_directory(worker: Worker) -> None:
    for call, request in (
        (worker.stub.StartProfile, pb.StartProfileRequest()),
        (worker.stub.StopProfile, pb.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(request)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "QUIRE_PROFILE_DIR" in (error.value.details() or "")


async def test_there_is_one_profile_at_a_time_and_each_has_its_own_file(tmp_path: Path) -> None:
    device = DeviceThread()
    profiles = Profiles(tmp_path, device)
    try:
        paths = set()
        for _ in range(2):
            await profiles.start()
            with pytest.raises(ProfileRefused, match="a profile runs already"):
                await profiles.start()
            paths.add(await profiles.stop())
            with pytest.raises(ProfileRefused, match="no profile runs"):
                await profiles.stop()
        assert paths == set(tmp_path.iterdir())
        assert len(paths) == 2
    finally:
        device.close()


async def test_a_profile_that_is_not_stopped_ends_by_itself(tmp_path: Path) -> None:
    device = DeviceThread()
    profiles = Profiles(tmp_path, device, max_seconds=0.01)
    try:
        await profiles.start()
        async with asyncio.timeout(60):
            while not list(tmp_path.glob("*.gz")):
                await asyncio.sleep(0.01)
        with pytest.raises(ProfileRefused, match="no profile runs"):
            await profiles.stop()
    finally:
        device.close()


async def test_a_cancelled_call_leaves_no_profile_without_an_end(tmp_path: Path) -> None:
    device = DeviceThread()
    profiles = Profiles(tmp_path, device)

    async def call_and_cancel(method: Callable[[], Coroutine[None, None, Path | None]]) -> None:
        go_on = threading.Event()
        blocked = asyncio.ensure_future(device.run(go_on.wait))
        call = asyncio.create_task(method())
        for _ in range(5):  # the call waits for the device
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        go_on.set()
        await blocked

    try:
        await call_and_cancel(profiles.start)
        with pytest.raises(ProfileRefused, match="a profile runs already"):  # after the cancelled call
            await profiles.start()
        await call_and_cancel(profiles.stop)
        with pytest.raises(ProfileRefused, match="no profile runs"):
            await profiles.stop()
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        device.close()


async def test_a_trace_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    device = DeviceThread()
    blocked = tmp_path / "file"
    blocked.touch()
    profiles = Profiles(blocked / "traces", device)
    try:
        await profiles.start()
        with pytest.raises(ProfileRefused, match="the trace cannot be written"):
            await profiles.stop()
    finally:
        device.close()
