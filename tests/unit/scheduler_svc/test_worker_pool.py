"""Workers come and go with the addresses that names have."""

import socket
from typing import Any

import grpc
import pytest

from checksum_service import serve
from ports import lasting_port
from quire.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker_links import ScriptedWorker, deployment, served, until


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("worker_link._REDIAL", 0.02), ("worker_pool._RESOLVE", 0.05), ("worker_link._WATCH", 0.05)):
        monkeypatch.setattr(f"scheduler_svc.{name}", seconds)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that are looked up here, and the addresses that they stand for."""
    known: dict[str, list[str]] = {}
    look_up = socket.getaddrinfo

    def found(host: str, port: Any, *args: Any, **options: Any) -> Any:
        if host not in known:
            return look_up(host, port, *args, **options)
        if not known[host]:
            raise socket.gaierror("not found")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return known


async def test_workers_join_and_leave_at_run_time(names: dict[str, list[str]]) -> None:
    workers = [ScriptedWorker(), ScriptedWorker()]
    first, port = await serve(workers[0], lasting_port())
    second = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_WorkerServiceServicer_to_server(workers[1], second)
    second.add_insecure_port(f"127.0.0.2:{port}")
    await second.start()
    names["workers"] = ["127.0.0.1"]
    async with deployment(f"workers:{port}") as running:
        await running.workers(1)
        workers[0].gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(workers[0].steps))
        names["workers"] = ["127.0.0.1", "127.0.0.2"]
        await running.workers(2)
        names["workers"] = ["127.0.0.2"]
        workers[0].gate.set()
        await running.workers(1)
        await until(lambda: not workers[0].num_open)
        await running.gateway.finish(key)
        num_steps = len(workers[0].steps)
        await running.gateway.finish(running.gateway.submit())
        assert len(workers[0].steps) == num_steps
    await first.stop(0)
    await second.stop(0)


async def test_the_only_worker_takes_requests_again_when_its_address_is_back(names: dict[str, list[str]]) -> None:
    """It does not end what it has first, which may take minutes."""
    worker = ScriptedWorker()
    names["workers"] = ["127.0.0.1"]
    async with served(worker) as (address,), deployment(f"workers:{address.rpartition(':')[2]}") as running:
        await running.workers(1)
        worker.gate.clear()
        key = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        names["workers"] = ["127.0.0.2"]
        await until(lambda: running.engine.replicas[0].is_retired)
        names["workers"] = ["127.0.0.1"]
        late = running.gateway.submit()
        await until(lambda: len(worker.openings) == 2)
        worker.gate.set()
        for each in (key, late):
            await running.gateway.finish(each)


async def test_a_name_that_is_not_found_hides_no_other_and_loses_none_of_its_own(names: dict[str, list[str]]) -> None:
    services = ScriptedWorker(), ScriptedWorker(model="other", fingerprint=b"other")
    names |= {"first": [], "second": ["127.0.0.1"]}
    async with served(*services) as (first, second):
        named = [f"{name}:{address.rpartition(':')[2]}" for name, address in (("first", first), ("second", second))]
        async with deployment(*named) as running:
            await running.workers(1)
            assert [model.name for model in running.engine.models] == ["other"]
            assert not running.engine.models.all_connected
            names["first"] = ["127.0.0.1"]
            await running.workers(2)
            await until(lambda: running.engine.models.all_connected)
            names["second"] = []
            await until(lambda: not running.engine.models.all_connected)
            assert len(running.engine.replicas) == 2


async def test_a_name_that_no_resolver_takes_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def refuse(host: str, *args: Any, **options: Any) -> Any:
        if host == "first":
            raise UnicodeError("label too long")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    async with served(ScriptedWorker()) as (second,), deployment("first:1", second) as running:
        await running.workers(1)
        assert not running.engine.models.all_connected
