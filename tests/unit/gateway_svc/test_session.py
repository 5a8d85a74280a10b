"""The session stream: real streams, to scripted schedulers."""

import asyncio
import logging
import socket
import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway_sessions import FINGERPRINT, MODEL, MODEL_INFO, OTHER_INFO, OTHER_MODEL, SessionClient, dialling
from gateway_svc import scheduler_dialer
from gateway_svc import session as session_module
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedScheduler, serving
from svc_common.epochs import EPOCH_AHEAD, LatestEpoch
from svc_common.errors import QuireError, Reason
from svc_common.identity import PLAIN
from svc_common.protocols import SESSION_PROTOCOLS, ProtocolRange

ONE, TWO = scheduler_v1.Tokens(token_ids=[1]), scheduler_v1.Tokens(token_ids=[1, 2])


def logged_by_gateway(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without records of other loggers, such as asyncio's of what an earlier test left."""
    return [record for record in caplog.records if record.name == "quire.gateway"]


async def test_models_are_ready_by_the_status(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    scheduler.session.status(None)
    await client.wait_for()
    scheduler.session.status(MODEL)
    await client.wait_for(MODEL_INFO)


async def test_the_first_scheduler_that_answers_is_used(scheduler: ScriptedScheduler) -> None:
    async with dialling("127.0.0.1:1", scheduler.address, "127.0.0.1:2") as client:
        await client.wait_for(MODEL_INFO)


def changed(**changes: Any) -> scheduler_v1.Model:
    """The model with some fields replaced."""
    other = scheduler_v1.Model()
    other.CopyFrom(MODEL)
    other.MergeFrom(scheduler_v1.Model(**changes))
    return other


async def test_a_model_with_another_tokenizer_is_not_ready_and_logged(
    client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    other = changed(tokenizer_fingerprint=b"\x03" * 32)
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        scheduler.session.status(other)
        await client.wait_for()
    (record,) = logged_by_gateway(caplog)
    logged = vars(record)
    assert logged["model"] == "tiny"
    assert logged["tokenizer_fingerprint"] == FINGERPRINT.hex()
    assert logged["scheduler_tokenizer_fingerprint"] == other.tokenizer_fingerprint.hex()


async def test_of_versions_with_different_tokenizers_the_gateways_own_is_used(
    client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    other = changed(tokenizer_fingerprint=b"\x03" * 32, context_length=1)
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        for listed in ([MODEL, other], [other, MODEL]):
            scheduler.session.status(*listed)
            await client.wait_for(MODEL_INFO)
            scheduler.session.status(OTHER_MODEL)
            await client.wait_for(OTHER_INFO)
    assert not logged_by_gateway(caplog)


async def test_models_under_other_names_are_logged(
    client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        scheduler.session.status(changed(name="stranger"))
        await client.wait_for()
    logged = [vars(record) for record in logged_by_gateway(caplog)]
    assert [(one["model"], one["scheduler_models"]) for one in logged] == [("tiny", "stranger"), ("other", "stranger")]


async def test_a_mismatch_is_logged_once_until_it_changes(
    client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (changed(tokenizer_fingerprint=bytes([number]) * 32) for number in (3, 4))
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        for model in (first, first, MODEL, first, second):
            scheduler.session.status(model, OTHER_MODEL, is_store_degraded=True)
        scheduler.session.status()
        await client.wait_for()
    logged = [vars(record)["scheduler_tokenizer_fingerprint"] for record in logged_by_gateway(caplog)]
    assert logged == [model.tokenizer_fingerprint.hex() for model in (first, first, second)]


async def test_a_model_that_is_not_there_yet_is_nothing_to_log(
    client: SessionClient, scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        scheduler.session.status(OTHER_MODEL)
        await client.wait_for(OTHER_INFO)
    assert not logged_by_gateway(caplog)


async def test_each_model_is_ready_by_itself(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    scheduler.session.status(OTHER_MODEL, changed(name="stranger"), MODEL)
    await client.wait_for(MODEL_INFO, OTHER_INFO)
    scheduler.session.status(OTHER_MODEL)
    await client.wait_for(OTHER_INFO)
    with pytest.raises(QuireError) as refusal:
        client.submit("k")
    assert refusal.value.reason is Reason.MODEL_NOT_READY
    assert "tiny" in refusal.value.message
    client.submit("k", model="other")
    assert (await scheduler.next("submit")).model == "other"


async def test_a_model_that_goes_fails_what_waits_for_it_alone(
    client: SessionClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.session.status(MODEL, OTHER_MODEL)
    await client.wait_for(MODEL_INFO, OTHER_INFO)
    monkeypatch.setattr(session_module, "_SUBMIT_TIMEOUT_SECONDS", 0.01)
    gone, attached, there = client.submit("a", model="other"), client.attach("b"), client.submit("c")
    for _ in range(2):
        await scheduler.next("submit")
    scheduler.session.status(MODEL)
    assert (await gone.failure()).reason is Reason.CAPACITY_EXHAUSTED
    scheduler.session.accept("c")
    scheduler.session.attached(scheduler_v1.Submit(key="b", n=1))
    assert await there.next() == ("accepted", True)
    assert await attached.next() == ("attached", {})


async def test_a_submission_waits_for_its_model_alone(client: SessionClient, scheduler: ScriptedScheduler) -> None:
    scheduler.session.status(MODEL, OTHER_MODEL)
    await client.wait_for(MODEL_INFO, OTHER_INFO)
    scheduler.is_leader = False
    scheduler.session.close()
    client.submit("a", model="other")
    waiting = client.submit("b")
    scheduler.is_leader = True
    assert (await scheduler.next("submit")).key == "b"
    scheduler.session.accept("b")
    assert await waiting.next() == ("accepted", True)
    scheduler.session.status(MODEL, OTHER_MODEL)
    assert (await scheduler.next("submit")).key == "a"


async def test_the_first_command_names_the_newest_common_protocol(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    client.submit("k")
    await scheduler.next("submit")
    assert scheduler.commands[0].hello.protocol == SESSION_PROTOCOLS.newest
    later = ProtocolRange(SESSION_PROTOCOLS.newest, SESSION_PROTOCOLS.newest + 5)
    async with serving(ScriptedScheduler(MODEL, protocols=later)) as newer, dialling(newer.address):
        assert (await newer.next("hello")).protocol == SESSION_PROTOCOLS.newest


async def test_a_scheduler_of_protocol_1_is_sent_nothing_that_it_does_not_know() -> None:
    async with serving(ScriptedScheduler(MODEL, protocols=None)) as older, dialling(older.address) as client:
        await client.wait_for(MODEL_INFO)
        await client.running(older)
        assert [command.WhichOneof("command") for command in older.commands] == ["submit"]
        older.session.status(None)
        await client.wait_for()


@pytest.mark.parametrize("protocol", [SESSION_PROTOCOLS.newest, 3])
async def test_commands_that_wait_are_one_message_if_the_scheduler_reads_such(protocol: int) -> None:
    protocols = ProtocolRange(1, protocol)
    async with serving(ScriptedScheduler(MODEL, protocols=protocols)) as other, dialling(other.address) as client:
        await client.wait_for(MODEL_INFO)
        await other.next("hello")
        requests = [client.submit(f"k{number}") for number in range(100)]
        for number, request in enumerate(requests):
            assert (await other.next("submit")).key == f"k{number}"
            other.session.accept(f"k{number}")
            assert await request.next() == ("accepted", True)
        num_messages = other.num_messages - 1  # the first is the Hello
        assert num_messages == (2 if protocol == SESSION_PROTOCOLS.newest else 100)


async def test_a_scheduler_without_a_common_protocol_is_left_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest = SESSION_PROTOCOLS.newest
    with caplog.at_level(logging.ERROR, "quire.gateway"):
        async with serving(ScriptedScheduler(MODEL, protocols=ProtocolRange(newest + 1, newest + 2))) as stranger:
            async with dialling(stranger.address) as client:
                await stranger.joined(3)
                assert not client.session.models
                stranger.protocols = SESSION_PROTOCOLS
                await client.wait_for(MODEL_INFO)
            async with serving(ScriptedScheduler(MODEL)) as fitting:
                stranger.protocols = ProtocolRange(newest + 1, newest + 2)
                async with dialling(stranger.address, fitting.address) as client:
                    await client.wait_for(MODEL_INFO)
                    await client.running(fitting)
    logged = [vars(one) for one in logged_by_gateway(caplog) if "no session protocol in common" in one.getMessage()]
    assert {one["scheduler_protocols"] for one in logged} == {f"{newest + 1} to {newest + 2}"}
    assert 1 <= len(logged) <= 2  # once by each session that found this scheduler
    assert not stranger.all("submit")


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


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_named_request_that_no_scheduler_answers_in_time_is_not_cancelled(
    client: SessionClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Its client repeats it at another gateway meanwhile, and attaches to what the scheduler was sent here."""
    request = client.submit("k", is_named=is_named)
    await scheduler.next("submit")
    monkeypatch.setattr(session_module, "_SUBMIT_TIMEOUT_SECONDS", 0.01)
    scheduler.is_leader = False
    scheduler.session.close()
    assert (await request.failure()).reason is Reason.CAPACITY_EXHAUSTED
    scheduler.is_leader = True
    await client.wait_for(MODEL_INFO)
    client.submit("next")
    assert (await scheduler.next("submit")).key == "next"
    assert [cancel.key for cancel in scheduler.all("cancel")] == ([] if is_named else ["k"])


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


async def test_a_term_that_began_while_a_clock_was_days_ahead_does_not_keep_out_the_next_ones(
    scheduler: ScriptedScheduler,
) -> None:
    """Redis' clock was wrong, and was set right: epochs are lower now. The terms since then are in order."""
    now = time.time_ns() // 1000
    scheduler.epoch = now + 3 * EPOCH_AHEAD
    async with dialling(scheduler.address) as client:
        await client.wait_for(MODEL_INFO)
        request = await client.running(scheduler)
        scheduler.epoch = now
        scheduler.session.close()
        await scheduler.joined(2)
        scheduler.session.attached(scheduler_v1.Submit(key=(await scheduler.next("attach")).key, n=1), ONE)
        assert await request.next() == ("attached", {0: [1]})
        late = scheduler_v1.Event(key="k", tokens=scheduler_v1.Tokens(offset=1, token_ids=[2]))
        scheduler.session.send([late], epoch=now - 1)
        scheduler.session.tokens("k", [3], 1)
        assert await request.next() == ("tokens", [3])


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


async def test_a_scheduler_that_does_not_answer_does_not_delay_the_search(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_dialer, "_DIAL_SECONDS", 3600)
    # The kernel accepts its connections and no process reads them, as for a stopped process.
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        port = stopped.getsockname()[1]
        async with dialling(f"127.0.0.1:{port}", scheduler.address) as client:
            await client.wait_for(MODEL_INFO)


async def test_a_dial_that_fails_when_it_is_cancelled_does_not_delay_the_search(
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
        return SimpleNamespace(Session=lambda **given: FailingCall(SchedulerServiceStub(channel).Session(**given)))

    monkeypatch.setattr(scheduler_dialer, "SchedulerServiceStub", failing)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        async with dialling(f"127.0.0.1:{stopped.getsockname()[1]}", scheduler.address) as client:
            await client.wait_for(MODEL_INFO)


async def test_a_session_without_messages_is_closed(client: SessionClient, scheduler: ScriptedScheduler) -> None:
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
    await client.wait_for()
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
    await client.wait_for()
    assert client.session.is_store_degraded


async def test_the_highest_memory_pressure_of_its_models_is_known(
    client: SessionClient, scheduler: ScriptedScheduler
) -> None:
    high, critical = (
        changed(memory_pressure=pressure)
        for pressure in (worker_v1.MEMORY_PRESSURE_HIGH, worker_v1.MEMORY_PRESSURE_CRITICAL)
    )
    stranger = changed(name="stranger", memory_pressure=worker_v1.MEMORY_PRESSURE_CRITICAL)
    for model, expected in ((MODEL, "none"), (high, "high"), (critical, "critical"), (MODEL, "none")):
        scheduler.session.status(stranger)
        await client.wait_for()
        assert client.session.memory_pressure.value == "none"
        scheduler.session.status(stranger, model, OTHER_MODEL)
        await client.wait_for(MODEL_INFO, OTHER_INFO)
        assert client.session.memory_pressure.value == expected


async def test_a_credential_error_is_logged_again_after_a_session(
    scheduler: ScriptedScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = grpc.aio.Metadata()
    refusal = grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, nothing, nothing, "no")
    dialer = scheduler_dialer.SchedulerDialer([scheduler.address], PLAIN)
    for _ in range(2):
        dialer._log_refusal(scheduler.address, refusal)
    assert len(logged_by_gateway(caplog)) == 1
    connection = await dialer.connect(LatestEpoch())
    await connection.channel.close()
    dialer._log_refusal(scheduler.address, refusal)
    assert len([one for one in logged_by_gateway(caplog) if one.levelno == logging.ERROR]) == 2
