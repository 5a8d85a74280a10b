"""What clients receive while a scheduler dies, and while the store is unavailable."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_harness import Harness, encoded, reason_of, rest_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedScheduler, length_end

HELLO = encoded("hello world and more")


async def take_over(leader: ScriptedScheduler, standby: ScriptedScheduler) -> None:
    leader.is_leader, standby.is_leader = False, True
    leader.session.close()
    await standby.joined(1)


def asking(**fields: Any) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(generation=api.Generation(text="a", **fields))


@pytest.mark.parametrize("request_id", [None, "mine"])
async def test_a_stream_continues_without_gap_or_duplicate(
    request_id: str | None, pair: tuple[Harness, ScriptedScheduler]
) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking(request_id=request_id))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, HELLO[:2], 0)
    await call.read()
    chunk = await call.read()
    assert isinstance(chunk, api.StreamGenerateResponse)
    assert list(chunk.chunk.token_ids) == HELLO[:2]
    await take_over(quire.scheduler, standby)
    (tail,) = (await standby.next("attach")).unflushed
    assert (tail.offset, list(tail.token_ids)) == (0, HELLO[:2])
    standby.session.attached(submit, scheduler_v1.Tokens(token_ids=HELLO[:3]))
    standby.session.tokens(submit.key, HELLO[3:], 3, end=length_end())
    *chunks, usage = await rest_of(call)
    assert chunks[0].chunk.offset == 2
    assert [token for event in chunks for token in event.chunk.token_ids] == HELLO[2:]
    assert usage.usage.completion_tokens == len(HELLO)


async def test_a_new_scheduler_is_sent_which_version_of_the_model_computed_the_tokens(
    pair: tuple[Harness, ScriptedScheduler],
) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    assert submit.model_fingerprint == b""
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, HELLO[:2], 0, model_fingerprint=b"version")
    await call.read()
    await call.read()
    await take_over(quire.scheduler, standby)
    attach = await standby.next("attach")
    assert attach.model_fingerprint == b"version"
    standby.session.fail(submit.key, scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)
    again = await standby.next("submit")
    assert (again.model_fingerprint, len(again.unflushed)) == (b"version", 1)
    call.cancel()


async def test_log_probabilities_go_along(pair: tuple[Harness, ScriptedScheduler]) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking(logprobs=1))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    top = [worker_v1.Logprob(token_id=5, logprob=-0.25)]
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.25, top=top)]
    quire.scheduler.session.tokens(submit.key, [5], 0, logprobs=logprobs)
    await call.read()
    await call.read()
    await take_over(quire.scheduler, standby)
    (tail,) = (await standby.next("attach")).unflushed
    assert list(tail.logprobs) == logprobs
    call.cancel()


async def test_stop_strings_are_searched_for_on_and_acknowledged(
    pair: tuple[Harness, ScriptedScheduler],
) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking(stopping=api.Stopping(stop=["lo wor"])))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, encoded("hello"), 0)
    await call.read()
    await call.read()
    await take_over(quire.scheduler, standby)
    await standby.next("attach")
    standby.session.attached(submit, scheduler_v1.Tokens(token_ids=encoded("hello")))
    assert (await standby.next("acknowledge")).num_tokens == len(encoded("hello"))
    standby.session.tokens(submit.key, encoded(" world"), len(encoded("hello")))
    chunk, _ = await rest_of(call)
    assert chunk.chunk.finish.stop == "lo wor"
    assert (await standby.next("finish")).num_tokens == len(encoded("hello world"))


async def test_the_end_of_an_answer_is_sent_to_a_scheduler_that_may_lack_it(
    pair: tuple[Harness, ScriptedScheduler],
) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking(request_id="mine"))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, HELLO[:2], 0, model_fingerprint=b"version")
    quire.scheduler.session.durable(submit.key, 2)
    quire.scheduler.session.tokens(submit.key, HELLO[2:], 2, end=length_end())
    *_, usage = await rest_of(call)
    assert usage.usage.completion_tokens == len(HELLO)
    await take_over(quire.scheduler, standby)
    attach = await standby.next("attach")
    assert (attach.key, attach.submission_id) == (submit.key, submit.submission_id)
    assert attach.model_fingerprint == b"version"
    (end,) = attach.unflushed
    assert (end.offset, list(end.token_ids), end.is_truncated) == (2, HELLO[2:], False)
    standby.session.attached(submit, scheduler_v1.Tokens(token_ids=HELLO, end=length_end()))
    assert (await standby.next("detach")).key == submit.key


async def test_tokens_that_changed_are_never_given_out(pair: tuple[Harness, ScriptedScheduler]) -> None:
    quire, standby = pair
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [5, 6], 0)
    await call.read()
    await call.read()
    await take_over(quire.scheduler, standby)
    await standby.next("attach")
    standby.session.attached(submit, scheduler_v1.Tokens(token_ids=[5, 7, 8]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert reason_of(error.value)[0] == "INTERNAL"


async def test_a_request_that_comes_between_two_schedulers_is_taken(pair: tuple[Harness, ScriptedScheduler]) -> None:
    quire, standby = pair
    await quire.scheduler.lost()
    call = quire.stub.StreamGenerate(asking())
    standby.is_leader = True
    submit = await standby.next("submit")
    standby.session.accept(submit.key)
    standby.session.tokens(submit.key, HELLO, 0, end=length_end())
    *_, usage = await rest_of(call)
    assert usage.usage.completion_tokens == len(HELLO)


async def test_a_stream_that_no_scheduler_takes_up_ends_as_unavailable(model_directory: Path) -> None:
    async with running_gateway(model_directory, scheduler_patience=0.05) as quire:
        call = quire.stub.StreamGenerate(asking(request_id="mine"))
        submit = await quire.scheduler.next("submit")
        quire.scheduler.session.accept(submit.key)
        await call.read()
        await quire.scheduler.lost()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error.value)[0] == "CAPACITY_EXHAUSTED"


async def test_the_acceptance_has_whether_the_request_is_durable(quire: Harness) -> None:
    for is_durable in (True, False):
        call = quire.stub.StreamGenerate(asking())
        submit = await quire.scheduler.next("submit")
        quire.scheduler.session.accept(submit.key, is_durable=is_durable)
        acceptance = await call.read()
        assert isinstance(acceptance, api.StreamGenerateResponse)
        assert acceptance.acceptance.is_durable == is_durable
        call.cancel()


async def test_health_has_whether_requests_are_durable_and_which_workers_are_in_trouble(quire: Harness) -> None:
    well = {"status": "ready", "durable": True, "memory_pressure": "none", "workers_set_apart": 0}
    assert (await quire.http.get("/health")).json() == well
    assert quire.scheduler.model is not None
    model = scheduler_v1.Model(memory_pressure=worker_v1.MEMORY_PRESSURE_HIGH)
    model.MergeFrom(quire.scheduler.model)
    quire.scheduler.session.status(model, is_store_degraded=True, num_workers_set_apart=2)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    call = quire.stub.StreamGenerate(asking())
    await call.read()  # by now the status has arrived
    response = await quire.http.get("/health")
    assert response.status_code == 200
    ill = {"status": "ready", "durable": False, "memory_pressure": "high", "workers_set_apart": 2}
    assert response.json() == ill
    call.cancel()
