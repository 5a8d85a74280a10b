"""The session stream: real streams, to schedulers that do as the test says."""

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway_sessions import FINGERPRINT, MODEL, MODEL_INFO, SessionClient, dialling
from gateway_svc import session as session_module
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from scripted_scheduler import ScriptedScheduler, serving
from svc_common.errors import QuireError, Reason

ONE, TWO = scheduler_v1.Tokens(token_ids=[1]), scheduler_v1.Tokens(token_ids=[1, 2])


async def test_the_status_tells_what_is_ready(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    scheduler.session.status(None)
    await client.wait_for(None)
    scheduler.session.status(MODEL)
    await client.wait_for(MODEL_INFO)


async def test_the_first_scheduler_that_answers_is_used(scheduler: ScriptedScheduler) -> None:
    async with dialling("127.0.0.1:1", scheduler.address, "127.0.0.1:2") as client:
        await client.wait_for(MODEL_INFO)


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": b"\x02" * 32}, {"name": "other"}])
async def test_another_model_is_not_ready_and_logged(
    change: dict[str, Any], client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    other = scheduler_v1.Model()
    other.CopyFrom(MODEL)
    other.MergeFrom(scheduler_v1.Model(**change))
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        scheduler.session.status(other)
        await client.wait_for(None)
    (record,) = caplog.records
    logged = vars(record)
    assert logged["tokenizer_fingerprint"] == FINGERPRINT.hex()
    assert logged["scheduler_tokenizer_fingerprint"] == other.tokenizer_fingerprint.hex()
    assert (logged["model"], logged["scheduler_model"]) == ("tiny", other.name)


async def test_events_of_an_older_term_are_dropped(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = await client.running(scheduler)
    scheduler.epoch = 5
    scheduler.session.tokens("k", [1], 0)
    old = scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(offset=1, token_ids=[2]))
    scheduler.session.send([old], epoch=4)
    scheduler.session.tokens("k", [3], 1)
    assert await request.next() == ("tokens", [1])
    assert await request.next() == ("tokens", [3])


async def test_a_request_that_no_scheduler_takes_fails_in_time(
    client: SessionClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SUBMIT_TIMEOUT_SECONDS", 0.01)
    request = client.submit("k")
    await scheduler.next("submit")
    scheduler.session.status(None)
    assert (await request.failure()).reason is Reason.CAPACITY_EXHAUSTED


async def test_a_scheduler_of_an_older_term_is_left_for_the_next(scheduler: ScriptedScheduler) -> None:
    scheduler.epoch, scheduler.is_leader = 5, False
    async with (
        serving(ScriptedScheduler(MODEL, epoch=7)) as newer,
        dialling(scheduler.address, newer.address) as client,
    ):
        await client.wait_for(MODEL_INFO)
        request = await client.running(newer)
        scheduler.is_leader = True
        newer.session.close()
        await newer.joined(2)
        newer.session.attached(scheduler_v1.Submit(key=(await newer.next("attach")).key, n=1), ONE)
        assert await request.next() == ("attached", {0: [1]})
        assert not scheduler.all("attach")


async def test_a_scheduler_that_does_not_lead_is_passed_over(scheduler: ScriptedScheduler) -> None:
    async with serving(ScriptedScheduler(MODEL)) as standby:
        standby.is_leader = False
        async with dialling(standby.address, scheduler.address) as client:
            await client.wait_for(MODEL_INFO)
            request = await client.running(scheduler)
            scheduler.is_leader, standby.is_leader = False, True
            scheduler.session.close()
            assert (await standby.next("attach")).key == "k"
            standby.session.attached(scheduler_v1.Submit(key="k", n=1))
            assert await request.next() == ("attached", {})


async def test_a_scheduler_that_says_nothing_at_all_does_not_hold_up_the_search(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_DIAL_SECONDS", 3600)
    # The kernel takes its connections and nobody reads them, as where a process is stopped.
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        port = stopped.getsockname()[1]
        async with dialling(f"127.0.0.1:{port}", scheduler.address) as client:
            await client.wait_for(MODEL_INFO)


async def test_a_dial_that_fails_as_it_is_given_up_does_not_hold_up_the_search(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingCall:
        def __init__(self, call: Any) -> None:
            self._call = call

        async def read(self) -> Any:
            try:
                return await self._call.read()
            except asyncio.CancelledError:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._call, name)

    def failing(channel: Any) -> Any:
        return SimpleNamespace(Session=lambda: FailingCall(SchedulerServiceStub(channel).Session()))

    monkeypatch.setattr(session_module, "SchedulerServiceStub", failing)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        async with dialling(f"127.0.0.1:{stopped.getsockname()[1]}", scheduler.address) as client:
            await client.wait_for(MODEL_INFO)


async def test_a_scheduler_that_falls_silent_is_left(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    request = await client.running(scheduler)
    scheduler.session.is_mute = True
    await scheduler.joined(2)
    await scheduler.next("attach")
    scheduler.session.attached(scheduler_v1.Submit(key="k", n=1), TWO)
    assert await request.next() == ("attached", {0: [1, 2]})


async def test_the_model_outlasts_its_session_for_a_while(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    scheduler.is_leader = False
    scheduler.session.close()
    waiting = client.submit("k")
    scheduler.is_leader = True
    await scheduler.next("submit")
    scheduler.session.accept("k")
    assert await waiting.next() == ("accepted", True)


async def test_without_a_scheduler_for_long_nothing_is_ready(
    client: SessionClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SUBMIT_TIMEOUT_SECONDS", 0.05)
    scheduler.is_leader = False
    scheduler.session.close()
    await client.wait_for(None)
    with pytest.raises(QuireError) as refusal:
        client.attach("k")
    assert refusal.value.reason is Reason.MODEL_NOT_READY


async def test_what_runs_waits_for_the_next_scheduler_only_so_long(scheduler: ScriptedScheduler) -> None:
    async with dialling(scheduler.address, reconnect_timeout=0.05) as client:
        await client.wait_for(MODEL_INFO)
        request = await client.running(scheduler)
        scheduler.is_leader = False
        scheduler.session.close()
        error = await request.failure()
        assert error.reason is Reason.CAPACITY_EXHAUSTED
        assert error.retry_after


async def test_whether_the_store_is_there_is_known(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    assert not client.session.is_store_degraded
    scheduler.session.status(None, is_store_degraded=True)
    await client.wait_for(None)
    assert client.session.is_store_degraded
