"""The scheduler's metrics are by model."""

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from checksum_service import ChecksumService
from prometheus_page import read_samples
from scheduler_svc.collector import EngineCollector
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.replica import Replica
from scheduler_svc.journal import Journal
from scheduler_svc.step_wire import shape_from_proto
from worker_links import Deployment, deployment


def joined(running: Deployment, model: str, fingerprint: bytes) -> Replica:
    about = ChecksumService(model=model, fingerprint=fingerprint).about
    replica = Replica(shape_from_proto(about), name=f"{model} {fingerprint.decode()}")
    running.engine.add_worker(replica, about, asyncio.Event(), BlockHashReport({}, {}))
    return replica


def page(running: Deployment) -> str:
    return page_of(EngineCollector(running.engine))


def page_of(collector: EngineCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


async def test_workers_that_are_set_apart_are_named() -> None:
    async with deployment() as running:
        assert "quire_workers_set_apart{" not in page(running)
        running.engine.mark_set_apart("10.0.0.1:50053", "why")
        assert 'quire_workers_set_apart{worker="10.0.0.1:50053"} 1.0' in page(running)
        running.engine.mark_set_apart("10.0.0.1:50053", None)
        assert "quire_workers_set_apart{" not in page(running)


async def test_versions_of_a_model_are_added_up_and_models_are_not() -> None:
    async with deployment() as running:
        for model, fingerprint in (("a", b"1"), ("a", b"2"), ("b", b"1")):
            joined(running, model, fingerprint)
        text = page(running)
        assert 'quire_workers_ready{model="a"} 2.0' in text
        assert 'quire_workers_ready{model="b"} 1.0' in text
        assert 'quire_kv_blocks{model="a",state="free",tier="device"} 128.0' in text
        assert 'quire_cost_seconds{method="recompute",model="a",worker="a 2"}' in text
        assert read_samples(text)["quire_workers_ready"] == 3.0
        assert read_samples(text)['quire_kv_blocks{state="free",tier="device"}'] == 192.0


@pytest.mark.parametrize("name", ["quire_workers_ready", "quire_generation_tokens_total"])
async def test_a_model_whose_last_worker_left_keeps_its_metrics(name: str) -> None:
    async with deployment() as running:
        running.engine.remove_worker(joined(running, "a", b"1"))
        assert f'{name}{{model="a"}} 0.0' in page(running)


async def test_another_thread_reads_the_engine_on_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployment() as running:
        readers: list[int] = []

        def lag(journal: Journal) -> float:
            readers.append(threading.get_ident())
            return 0.5

        monkeypatch.setattr(Journal, "lag", property(lag))
        text = await asyncio.to_thread(page_of, EngineCollector(running.engine))
        assert "quire_journal_lag_seconds 0.5" in text
        assert set(readers) == {threading.get_ident()}
