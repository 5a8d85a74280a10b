"""Resumed streams over gRPC: from any token, of requests that run or have ended."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from gateway_harness import Harness, encoded, reason_of, rest_of
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedSession, answer_with, cut_end, length_end, stop_end
from tiny_model import EOS

TOKENS = [*encoded("hello 😀 world"), EOS]


def resume(quire: Harness, *positions: tuple[int, int], request_id: str = "mine") -> Any:
    asked = [api.Position(index=index, next_offset=offset) for index, offset in positions]
    return quire.stub.Resume(api.ResumeRequest(request_id=request_id, positions=asked))


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason and field of the error with which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rest_of(call)
    return (error.value.code(), *reason_of(error.value))


async def kept(quire: Harness, *sequences: scheduler_v1.Tokens, **fields: Any) -> scheduler_v1.Submit:
    """A request of another call; each Attach receives these sequences."""
    generation = api.Generation(**({"text": "a", "request_id": "mine"} | fields))
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation))
    submit = await quire.scheduler.next("submit")
    call.cancel()
    quire.scheduler.attach_script = lambda session, attach: session.attached(submit, *sequences)
    await quire.scheduler.next("detach")
    assert isinstance(submit, scheduler_v1.Submit)
    return submit


def ended(token_ids: Sequence[int], end: scheduler_v1.SequenceEnd, **more: Any) -> scheduler_v1.Tokens:
    return scheduler_v1.Tokens(token_ids=token_ids, end=end, **more)


async def test_a_request_of_another_tokenizer_is_not_made_text_of(quire: Harness) -> None:
    submit = await kept(quire, ended(TOKENS, stop_end(EOS)))
    assert submit.tokenizer_fingerprint
    submit.tokenizer_fingerprint = b"another"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await rest_of(resume(quire, (0, 0)))
    assert (error.value.code(), reason_of(error.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")


async def test_a_stream_resumes_at_every_offset(quire: Harness) -> None:
    submit = await kept(quire, ended(TOKENS, stop_end(EOS), cached_tokens=1), sampling=api.Sampling(seed=5))
    whole = ""
    for offset in range(len(TOKENS) + 1):
        acceptance, *chunks, usage = await rest_of(resume(quire, (0, offset)))
        assert (acceptance.acceptance.request_id, acceptance.acceptance.model) == ("mine", "tiny")
        assert (acceptance.acceptance.seed, acceptance.acceptance.is_durable) == (5, True)
        assert [event.chunk.offset for event in chunks] == [offset]
        assert [token for event in chunks for token in event.chunk.token_ids] == TOKENS[offset:]
        text = "".join(event.chunk.text for event in chunks)
        whole = whole or text
        assert whole.endswith(text)
        assert chunks[-1].chunk.finish == api.Finish(reason=api.FINISH_REASON_STOP, token_id=EOS)
        assert usage.usage == api.Usage(prompt_tokens=1, completion_tokens=len(TOKENS), cached_tokens=1)
    assert whole == "hello 😀 world"
    assert {attach.key for attach in quire.scheduler.all("attach")} == {submit.key}


async def test_what_still_runs_is_waited_for(quire: Harness) -> None:
    submit = await kept(quire, scheduler_v1.Tokens(token_ids=TOKENS[:2]))
    call = resume(quire, (0, 3))
    await call.read()
    quire.scheduler.session.tokens(submit.key, TOKENS[2:4], 2)
    quire.scheduler.session.tokens(submit.key, TOKENS[4:], 4, end=stop_end(EOS))
    *chunks, _ = await rest_of(call)
    assert chunks[0].chunk.offset == 3
    assert [token for event in chunks for token in event.chunk.token_ids] == TOKENS[3:]


async def test_each_sequence_resumes_at_its_own_position(quire: Harness) -> None:
    await kept(quire, *(ended(encoded("abc"), length_end(), index=index) for index in range(3)), n=3)
    _, *chunks, usage = await rest_of(resume(quire, (2, 1), (0, 3)))
    texts = {event.chunk.index: (event.chunk.offset, event.chunk.text) for event in chunks}
    assert texts == {0: (3, ""), 1: (0, "abc"), 2: (1, "bc")}
    assert usage.usage.completion_tokens == 9


async def test_a_stop_string_stands_where_it_was_found(quire: Harness) -> None:
    stopping = api.Stopping(stop=["lo w"], min_tokens=1)
    token_ids = encoded("hello world")
    await kept(quire, ended(token_ids, cut_end()), stopping=stopping)
    for offset, text in ((0, "hel"), (1, ""), (2, "")):
        _, event, _ = await rest_of(resume(quire, (0, offset)))
        assert (event.chunk.text, event.chunk.finish.stop) == (text, "lo w")
    assert not quire.scheduler.all("finish")


async def test_log_probabilities_are_those_requested(quire: Harness) -> None:
    token_ids = encoded("ab")
    top = [worker_v1.Logprob(token_id=token_id, logprob=-0.5) for token_id in token_ids]
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.5, top=top[:1])] * 2
    await kept(quire, ended(token_ids, length_end(), logprobs=logprobs), logprobs=1)
    _, event, _ = await rest_of(resume(quire, (0, 1)))
    (logprob,) = event.chunk.logprobs
    assert (logprob.text, [one.text for one in logprob.top]) == ("b", ["a"])


async def test_the_best_of_several_come_at_the_end_and_from_where_they_were_read(quire: Harness) -> None:
    def draw(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        sequences = []
        for index, (text, logprob) in enumerate([("he", -2.0), ("hello", -0.5), ("abc", -1.0)]):
            token_ids = encoded(text)
            logprobs = [worker_v1.TokenLogprobs(logprob=logprob)] * len(token_ids)
            sequences.append(ended(token_ids, length_end(), index=index, logprobs=logprobs))
        session.attached(submit, *sequences)

    generation = api.Generation(text="a", request_id="mine", n=2, best_of=3)
    quire.scheduler.script = draw
    await quire.stub.Generate(api.GenerateRequest(generation=generation))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.attach_script = lambda session, attach: draw(session, submit)
    _, first, second, usage = await rest_of(resume(quire, (1, 1)))
    assert (first.chunk.index, first.chunk.offset, first.chunk.text) == (0, 0, "hello")
    assert (second.chunk.index, second.chunk.offset, second.chunk.text) == (1, 1, "bc")
    assert not first.chunk.logprobs
    assert usage.usage.completion_tokens == len(encoded("he") + encoded("hello") + encoded("abc"))


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([(0, 4)], (grpc.StatusCode.OUT_OF_RANGE, "RESUME_OFFSET_INVALID", "positions[0].next_offset")),
        ([(1, 0), (0, 2**40)], (grpc.StatusCode.OUT_OF_RANGE, "RESUME_OFFSET_INVALID", "positions[1].next_offset")),
        ([(0, 1), (2, 1)], (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "positions[1].index")),
        ([(0, 1), (1, 1), (0, 1)], (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "positions[2].index")),
    ],
)
async def test_a_bad_position_is_named(
    positions: list[tuple[int, int]], expected: tuple[grpc.StatusCode, str, str], quire: Harness
) -> None:
    await kept(quire, *(ended(encoded("abc"), length_end(), index=index) for index in range(2)), n=2)
    assert await refused(resume(quire, *positions)) == expected


async def test_a_position_beyond_a_sequence_fails_at_its_end(quire: Harness) -> None:
    submit = await kept(quire, scheduler_v1.Tokens(token_ids=[5]))
    call = resume(quire, (0, 3))
    await call.read()
    quire.scheduler.session.tokens(submit.key, [6], 1, end=length_end())
    assert (await refused(call))[1:] == ("RESUME_OFFSET_INVALID", "positions[0].next_offset")


async def test_what_nobody_knows_is_not_found(quire: Harness) -> None:
    unknown = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
    quire.scheduler.attach_script = lambda session, attach: session.fail(attach.key, unknown)
    assert await refused(resume(quire)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN", "")


async def test_a_request_that_was_cancelled_is_so(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_CANCELLED
    quire.scheduler.attach_script = lambda session, attach: session.fail(attach.key, reason)
    assert (await refused(resume(quire)))[1] == "CANCELLED"


async def test_a_reader_that_leaves_detaches_a_named_request(quire: Harness) -> None:
    first = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=api.Generation(text="a")))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    accepted = await first.read()
    assert isinstance(accepted, api.StreamGenerateResponse)
    quire.scheduler.attach_script = lambda session, attach: session.attached(submit)
    second = resume(quire, request_id=accepted.acceptance.request_id)
    await second.read()
    first.cancel()
    async with asyncio.timeout(60):
        while await quire.metric('quire_gateway_requests_in_flight{model="tiny"}') != 1:
            await asyncio.sleep(0.01)
    second.cancel()
    assert (await quire.scheduler.next("detach")).key == submit.key
    assert not quire.scheduler.all("cancel")


async def test_the_same_request_under_the_same_name_is_answered_with_what_runs(quire: Harness) -> None:
    generation = api.Generation(text="a", request_id="mine")
    first = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, TOKENS[:2], 0)
    second = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation))
    again = await quire.scheduler.next("submit")
    assert again.body_digest == submit.body_digest
    assert again.sampling.seed != submit.sampling.seed
    quire.scheduler.session.attached(submit, scheduler_v1.Tokens(token_ids=TOKENS[:2]))
    quire.scheduler.session.tokens(submit.key, TOKENS[2:], 2, end=stop_end(EOS))
    for call in (first, second):
        acceptance, *chunks, usage = await rest_of(call)
        assert acceptance.acceptance.seed == submit.sampling.seed
        assert "".join(event.chunk.text for event in chunks) == "hello 😀 world"
        assert usage.usage.completion_tokens == len(TOKENS)


async def test_a_whole_answer_is_given_again(quire: Harness) -> None:
    generation = api.Generation(text="a", request_id="mine", sampling=api.Sampling(seed=3))
    quire.scheduler.script = answer_with(TOKENS)
    first = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    submit = await quire.scheduler.next("submit")
    record = ended(first.completions[0].token_ids, stop_end(EOS))
    quire.scheduler.script = lambda session, again: session.attached(submit, record)
    again = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    assert again.completions == first.completions
    assert again.usage == first.usage


async def test_another_request_under_the_same_name_is_refused(quire: Harness) -> None:
    submit = await kept(quire)
    quire.scheduler.script = lambda session, other: session.fail(other.key, scheduler_v1.FAILURE_REASON_KEY_IN_USE)
    generation = api.Generation(text="b", request_id="mine")
    call = quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation))
    reason = (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED", "generation.request_id")
    assert (await refused(call))[:3] == reason
    assert (await quire.scheduler.next("submit")).body_digest != submit.body_digest


@pytest.mark.parametrize("best_of", [1, 2])
async def test_a_long_sequence_is_resumed_in_messages_of_bounded_size(
    best_of: int, quire: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.rendering._CHUNK_BYTES", 4_000)
    top = [worker_v1.Logprob(token_id=token, logprob=-1.0) for token in range(5)]
    token_ids = encoded("hello") * 200
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.5, top=top)] * len(token_ids)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    generation = api.Generation(text="a", request_id="mine", best_of=best_of, logprobs=5)
    call = quire.stub.Generate(api.GenerateRequest(generation=generation))
    submit = await quire.scheduler.next("submit")
    call.cancel()
    await quire.scheduler.next("detach")
    sequences = [ended(token_ids, length_end(), index=index, logprobs=logprobs) for index in range(best_of)]
    quire.scheduler.attach_script = lambda session, attach: session.attached(submit, *sequences)
    responses = await rest_of(resume(quire, (0, 7)))
    chunks = [response.chunk for response in responses if response.HasField("chunk")]
    assert len(chunks) > 10
    assert max(response.ByteSize() for response in responses) < 4_100
    assert [token for chunk in chunks for token in chunk.token_ids] == token_ids[7:]
    assert len([one for chunk in chunks for one in chunk.logprobs]) == len(token_ids) - 7
    assert "".join(chunk.text for chunk in chunks) == "hello" * 193
    assert [chunk.finish.reason for chunk in chunks if chunk.HasField("finish")] == [api.FINISH_REASON_LENGTH]
