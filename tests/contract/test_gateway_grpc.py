"""quire.inference.v1.InferenceService over the wire, before a scripted scheduler."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway_harness import Harness, encoded, reason_of, running_gateway, scheduler_model
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with, length_end, stop_end
from tiny_model import CONTEXT_LENGTH, EOS

HELLO = encoded("hello world")


def asking(text: str = "hello", **fields: Any) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(generation=api.Generation(text=text, **fields))


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call, unary or a stream, ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (consumed(call) if hasattr(call, "read") else call)
    return error.value


async def consumed(call: Any) -> list[Any]:
    """All messages of a stream."""
    return [message async for message in call]


async def test_a_stream_is_acceptance_then_chunks_then_usage(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS, cached_tokens=3)
    call = quire.stub.StreamGenerate(asking("he llo", sampling=api.Sampling(seed=-5)))
    acceptance, *chunks, usage = await consumed(call)
    assert acceptance.acceptance.model == "tiny"
    assert acceptance.acceptance.seed == -5
    assert dict(await call.initial_metadata())["x-request-id"] == acceptance.acceptance.request_id
    assert "".join(event.chunk.text for event in chunks) == "hello world"
    assert [token_id for event in chunks for token_id in event.chunk.token_ids] == [*HELLO, EOS]
    num_before = 0
    for event in chunks:  # steps that came while nothing was read are one chunk
        assert event.chunk.offset == num_before
        num_before += len(event.chunk.token_ids)
    assert chunks[-1].chunk.finish == api.Finish(reason=api.FINISH_REASON_STOP, token_id=EOS)
    assert usage.usage == api.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=3)


async def test_what_is_submitted_is_what_was_asked(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    sampling = api.Sampling(temperature=0, top_k=3, seed=9, logit_bias={4: -1.5})
    stopping = api.Stopping(max_tokens=2, min_tokens=1, stop=["x"], stop_token_ids=[7])
    request = asking(sampling=sampling, stopping=stopping, n=2, priority=-3, request_id="mine", logprobs=1)
    await quire.stub.Generate(api.GenerateRequest(generation=request.generation), timeout=60)
    (submit,) = quire.scheduler.all("submit")
    assert list(submit.prompt_token_ids) == encoded("hello")
    assert (submit.tenant, submit.weight, submit.detachable, submit.priority) == ("default", 1.0, True, -3)
    assert (submit.n, submit.max_tokens, submit.has_stop_strings) == (2, 2, True)
    assert list(submit.stop_token_ids) == [EOS, 7]
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0, 3, 9)
    assert dict(submit.sampling.logit_bias) == {4: -1.5}
    assert (submit.sampling.min_tokens, list(submit.sampling.suppressed_token_ids)) == (1, [EOS, 7])
    assert 0 < submit.time_left.ToTimedelta().total_seconds() < 61  # grpc rounds up
    assert len(submit.cache_salt) == 32
    assert len(submit.key) == len(hashlib.sha256().hexdigest())
    assert submit.traceparent == ""


async def test_a_whole_answer_has_every_sequence_by_index(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), encoded("he"), stop_token_id=EOS)
    generation = asking("a", n=2).generation
    answer = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    assert [(one.index, one.text) for one in answer.completions] == [(0, "hello"), (1, "he")]
    assert answer.usage == api.Usage(prompt_tokens=1, completion_tokens=4)
    assert answer.acceptance.request_id


async def test_logprobs_come_with_text_and_bytes_of_tokens(quire: Harness) -> None:
    ids = encoded("ß")
    quire.scheduler.script = answer_with(ids)
    generation = asking(logprobs=2, stopping=api.Stopping(max_tokens=2)).generation
    answer = await quire.stub.Generate(api.GenerateRequest(generation=generation))
    first, second = answer.completions[0].logprobs
    assert (first.token_id, first.token, first.token_bytes, first.logprob) == (ids[0], "\ufffd", b"\xc3", -0.5)
    assert [one.token_id for one in first.top] == [ids[0], ids[0] + 1]
    assert first.token_bytes + second.token_bytes == "ß".encode()
    assert answer.completions[0].text == "ß"


async def test_a_stop_string_ends_its_sequence_here_and_is_reported(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world and more"), encoded("hello"))
    request = asking(n=2, stopping=api.Stopping(stop=["lo w"], max_tokens=9), request_id="r")
    call = quire.stub.StreamGenerate(request)
    events = await consumed(call)
    stopped = [event.chunk for event in events if event.WhichOneof("event") == "chunk" and event.chunk.index == 0]
    assert "".join(chunk.text for chunk in stopped) == "hel"
    assert stopped[-1].finish == api.Finish(reason=api.FINISH_REASON_STOP, stop="lo w")
    finish = await quire.scheduler.next("finish")
    assert (finish.index, finish.num_tokens) == (0, 2)
    assert finish.key == quire.scheduler.all("submit")[0].key
    assert events[-1].usage.completion_tokens == 2 + len(encoded("hello"))


async def test_what_was_looked_at_is_acknowledged_though_the_client_does_not_read(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(stopping=api.Stopping(stop=["x"])))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    for offset in range(40):
        quire.scheduler.session.tokens(submit.key, [encoded("a")[0]], offset)
    assert [(await quire.scheduler.next("acknowledge")).num_tokens for _ in range(2)] == [16, 32]
    quire.scheduler.session.tokens(submit.key, [], 40, end=length_end())
    text = "".join(event.chunk.text for event in await consumed(call))
    assert text == "a" * 40


async def test_without_stop_strings_nothing_is_acknowledged(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("a" * 50))
    await quire.stub.Generate(api.GenerateRequest(generation=asking().generation))
    assert quire.scheduler.all("acknowledge") == quire.scheduler.all("finish") == []


async def test_tokens_that_came_before_are_not_given_twice(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    a, b, c = encoded("abc")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [a, b], 0)
    quire.scheduler.session.tokens(submit.key, [b, c], 1)
    quire.scheduler.session.tokens(submit.key, [], 3, end=length_end())
    assert "".join(event.chunk.text for event in await consumed(call)) == "abc"


async def test_tokens_that_are_missing_are_a_fault(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [5], 1)
    error = await refused(call)
    assert reason_of(error)[0] == "INTERNAL"
    assert (await quire.scheduler.next("cancel")).key == submit.key


@pytest.mark.parametrize(("request_id", "kind"), [(None, "cancel"), ("mine", "detach")])
async def test_a_client_that_leaves_is_noticed(request_id: str | None, kind: str, quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(request_id=request_id))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await call.read()
    call.cancel()
    assert (await quire.scheduler.next(kind)).key == submit.key
    await quire.http.get("/health")
    assert await quire.metric("quire_gateway_requests_in_flight") == 0


async def test_a_client_that_leaves_before_acceptance_is_noticed(quire: Harness) -> None:
    call = quire.stub.Generate(api.GenerateRequest(generation=asking().generation))
    submit = await quire.scheduler.next("submit")
    call.cancel()
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_a_client_whose_deadline_passes_is_noticed(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(), timeout=2)
    submit = await quire.scheduler.next("submit")
    assert 0 < submit.time_left.ToTimedelta().total_seconds() < 3  # grpc rounds up
    error = await refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await quire.scheduler.next("cancel")).key == submit.key


async def test_a_request_that_ends_is_neither_cancelled_nor_detached(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    for request_id in (None, "mine"):
        await quire.stub.Generate(api.GenerateRequest(generation=asking(request_id=request_id).generation))
    assert quire.scheduler.all("cancel") == quire.scheduler.all("detach") == []


async def test_cancel_names_the_key_of_the_running_request(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(request_id="mine"))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await quire.stub.Cancel(api.CancelRequest(request_id="mine"))
    assert (await quire.scheduler.next("cancel")).key == submit.key
    quire.scheduler.session.fail(submit.key, scheduler_v1.FAILURE_REASON_CANCELLED)
    error = await refused(call)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert reason_of(error)[0] == "CANCELLED"


async def test_cancel_works_for_the_id_that_an_acceptance_gave(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking())
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    accepted = await call.read()
    assert isinstance(accepted, api.StreamGenerateResponse)
    await quire.stub.Cancel(api.CancelRequest(request_id=accepted.acceptance.request_id))
    assert (await quire.scheduler.next("cancel")).key == submit.key
    call.cancel()


async def test_a_refusal_carries_its_request_id_and_no_first_metadata(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking("", request_id="mine"))
    error = await refused(call)
    assert dict(error.trailing_metadata() or ())["x-request-id"] == "mine"
    assert "x-request-id" not in dict(error.initial_metadata() or ())


async def test_text_and_chats_become_tokens(quire: Harness) -> None:
    answer = await quire.stub.Tokenize(api.TokenizeRequest(text="hello world"))
    assert (list(answer.token_ids), answer.context_length) == (HELLO, CONTEXT_LENGTH)
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="hello")])
    answer = await quire.stub.Tokenize(api.TokenizeRequest(chat=chat))
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(answer.token_ids) == encoded(rendered)


async def test_tokens_become_text(quire: Harness) -> None:
    hidden = await quire.stub.Detokenize(api.DetokenizeRequest(token_ids=[*HELLO, EOS]))
    kept = await quire.stub.Detokenize(api.DetokenizeRequest(token_ids=[*HELLO, EOS], keep_special_tokens=True))
    assert (hidden.text, kept.text) == ("hello world", "hello world<|im_end|>")


async def test_the_model_is_listed(quire: Harness, model_directory: Path) -> None:
    answer = await quire.stub.ListModels(api.ListModelsRequest())
    expected = scheduler_model(model_directory)
    assert list(answer.models) == [
        api.Model(name="tiny", context_length=CONTEXT_LENGTH, vocab_size=expected.vocab_size)
    ]


@pytest.mark.parametrize(
    ("method", "request_", "reason", "field"),
    [
        ("Generate", api.GenerateRequest(), "INVALID_FIELD", "generation.prompt"),
        ("Tokenize", api.TokenizeRequest(), "INVALID_FIELD", "input"),
        ("Tokenize", api.TokenizeRequest(text=""), "INVALID_FIELD", "text"),
        ("Tokenize", api.TokenizeRequest(text="a", model="x"), "MODEL_NOT_FOUND", "model"),
        ("Tokenize", api.TokenizeRequest(chat=api.Chat()), "INVALID_FIELD", "chat.messages"),
        ("Detokenize", api.DetokenizeRequest(token_ids=[1, 10**6]), "INVALID_FIELD", "token_ids[1]"),
        ("Detokenize", api.DetokenizeRequest(token_ids=[1], model="x"), "MODEL_NOT_FOUND", "model"),
        ("Cancel", api.CancelRequest(), "INVALID_FIELD", "request_id"),
        ("Cancel", api.CancelRequest(request_id="no such/id"), "INVALID_FIELD", "request_id"),
        ("Resume", api.ResumeRequest(), "INVALID_FIELD", "request_id"),
        ("Resume", api.ResumeRequest(request_id="no such/id"), "INVALID_FIELD", "request_id"),
    ],
)
async def test_bad_requests_are_refused_by_field(
    method: str, request_: Any, reason: str, field: str, quire: Harness
) -> None:
    assert reason_of(await refused(getattr(quire.stub, method)(request_))) == (reason, field)


async def test_a_message_that_does_not_parse_is_malformed(quire: Harness) -> None:
    call = raw_call(quire, "StreamGenerate")(b"\xff\xff\xff")
    error = await refused(call)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, ("MALFORMED_MESSAGE", ""))


async def test_a_message_that_is_too_large_leaves_the_next_alone(quire: Harness) -> None:
    large = b"\x12" + b"\x80\x80\x80\x10" + b"a" * (32 * 2**20)
    error = await refused(raw_call(quire, "StreamGenerate")(large))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await quire.stub.ListModels(api.ListModelsRequest())).models


def raw_call(quire: Harness, method: str) -> Any:
    """A method that takes bytes for a message."""
    return quire.channel.unary_stream(f"/quire.inference.v1.InferenceService/{method}")


ANSWERS = {
    grpc.StatusCode.INVALID_ARGUMENT: {
        "MALFORMED_MESSAGE", "INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED", "FEATURE_UNSUPPORTED",
    },
    grpc.StatusCode.NOT_FOUND: {"MODEL_NOT_FOUND"},
}  # fmt: skip

ids = st.integers(0, 2**32 - 1)
generations = st.builds(
    api.Generation,
    model=st.none() | st.sampled_from(["tiny", "other"]),
    text=st.text(max_size=20),
    sampling=st.builds(
        api.Sampling,
        temperature=st.none() | st.floats(),
        top_p=st.none() | st.floats(),
        top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
        logit_bias=st.dictionaries(ids, st.floats(), max_size=2),
    ),
    stopping=st.builds(
        api.Stopping,
        max_tokens=st.none() | ids,
        min_tokens=st.none() | ids,
        stop=st.lists(st.text(max_size=5), max_size=3),
        stop_token_ids=st.lists(ids, max_size=2),
    ),
    n=st.none() | st.integers(0, 3) | ids,
    best_of=st.none() | st.integers(0, 3) | ids,
    beam_search=st.none() | st.builds(api.BeamSearch, width=st.integers(0, 3), length_penalty=st.floats()),
    request_id=st.none() | st.text(max_size=5),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(message=st.binary(max_size=60) | generations.map(lambda one: asking_for(one)))
async def test_any_message_is_answered_or_refused_as_documented(message: bytes, quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    try:
        await consumed(raw_call(quire, "StreamGenerate")(message))
    except grpc.aio.AioRpcError as error:
        if reason_of(error)[0] not in ANSWERS.get(error.code(), ()):
            raise


def asking_for(generation: api.Generation) -> bytes:
    return api.StreamGenerateRequest(generation=generation).SerializeToString()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nkey = "secret"\ntenant = "alice"\nweight = 3\n')
    return path


async def test_a_key_decides_the_tenant(key_file: Path, model_directory: Path) -> None:
    async with running_gateway(model_directory, api_keys=key_file) as quire:
        quire.scheduler.script = answer_with(HELLO)
        for metadata in (None, (("authorization", "Bearer wrong"),)):
            for call in (
                quire.stub.StreamGenerate(asking(), metadata=metadata),
                quire.stub.Generate(api.GenerateRequest(), metadata=metadata),
                quire.stub.Tokenize(api.TokenizeRequest(text="a"), metadata=metadata),
                quire.stub.Detokenize(api.DetokenizeRequest(), metadata=metadata),
                quire.stub.Cancel(api.CancelRequest(request_id="a"), metadata=metadata),
                quire.stub.Resume(api.ResumeRequest(request_id="a"), metadata=metadata),
                quire.stub.ListModels(api.ListModelsRequest(), metadata=metadata),
            ):
                error = await refused(call)
                assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        metadata = (("authorization", "Bearer secret"),)
        await quire.stub.Generate(api.GenerateRequest(generation=asking().generation), metadata=metadata)
        (submit,) = quire.scheduler.all("submit")
        assert (submit.tenant, submit.weight) == ("alice", 3.0)
        # Health and reflection need no key.
        await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
        assert "quire.inference.v1.InferenceService" in await reflected(quire)


async def test_health_is_told_per_service_and_reflection_shows_only_what_is_public(quire: Harness) -> None:
    health = health_pb2_grpc.HealthStub(quire.channel)
    for service in ("", "quire.inference.v1.InferenceService", "liveness"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    names = await reflected(quire)
    assert not any(inner in name for inner in ("scheduler", "worker", "admin") for name in names)


async def reflected(quire: Harness) -> list[str]:
    """Names of the services that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(quire.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for answer in call:
        return [service.name for service in answer.list_services_response.service]
    return []


async def test_health_follows_the_scheduler(quire: Harness) -> None:
    quire.scheduler.session.status(None)
    await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await refused(quire.stub.ListModels(api.ListModelsRequest()))
    assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")
    quire.scheduler.session.status(quire.scheduler.model)
    await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)


async def test_calls_are_counted_by_their_code(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    await quire.stub.Generate(api.GenerateRequest(generation=asking("hello").generation))
    await refused(quire.stub.Generate(api.GenerateRequest()))
    await consumed(quire.stub.StreamGenerate(asking()))
    name = "quire_gateway_requests_total"
    assert await quire.metric(name + '{code="OK",method="Generate",protocol="grpc"}') == 1
    assert await quire.metric(name + '{code="INVALID_ARGUMENT",method="Generate",protocol="grpc"}') == 1
    assert await quire.metric(name + '{code="OK",method="StreamGenerate",protocol="grpc"}') == 1
    assert await quire.metric("quire_gateway_prompt_tokens_total") == 2
    assert await quire.metric("quire_gateway_generation_tokens_total") == 6
    assert await quire.metric("quire_gateway_time_to_first_token_seconds_count") == 2
    assert await quire.metric("quire_gateway_inter_token_latency_seconds_count") == 4


async def test_many_requests_share_one_session(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    request = api.GenerateRequest(generation=asking(n=3).generation)
    answers = await asyncio.gather(*(quire.stub.Generate(request) for _ in range(50)))
    assert {one.text for answer in answers for one in answer.completions} == {"hello world"}
    assert len(quire.scheduler.sessions) == 1


async def test_the_end_may_come_with_the_stop_token_alone(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking(stopping=api.Stopping(stop_token_ids=[9])))
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.tokens(submit.key, [9], 0, end=stop_end(9))
    _, event, usage = await consumed(call)
    assert (event.chunk.text, list(event.chunk.token_ids), event.chunk.finish.token_id) == ("", [9], 9)
    assert usage.usage.completion_tokens == 1
