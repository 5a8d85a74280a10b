"""Requests that the gRPC service rejects: by field, by size, by key, or because it serves no model."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway_calls import asking, consumed, raw_call, refused
from gateway_harness import Harness, encoded, reason_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedSession, answer_with
from tiny_model import CONTEXT_LENGTH, EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = encoded("hello world")
REFLECTION = ("v1", "v1alpha")
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")


LONG = "a " * (CONTEXT_LENGTH + 1)
LONG_IDS = [1] * (CONTEXT_LENGTH + 1)
LONG_CHAT = api.Chat(messages=[api.ChatMessage(role="user", content=LONG)])
ROOT = api.Chat(messages=[api.ChatMessage(role="root", content="a")])


@pytest.fixture
def quire(shared: Harness) -> Harness:
    return shared


async def test_a_refusal_carries_its_request_id_and_no_first_metadata(quire: Harness) -> None:
    call = quire.stub.StreamGenerate(asking("", request_id="mine"))
    error = await refused(call)
    assert dict(error.trailing_metadata() or ())["x-request-id"] == "mine"
    assert "x-request-id" not in dict(error.initial_metadata() or ())


@pytest.mark.parametrize(
    ("method", "request_", "reason", "field"),
    [
        ("Generate", api.GenerateRequest(), "INVALID_FIELD", "generation.prompt"),
        ("Tokenize", api.TokenizeRequest(), "INVALID_FIELD", "input"),
        ("Generate", api.GenerateRequest(generation=api.Generation(text="")), "INVALID_FIELD", "generation.text"),
        ("Tokenize", api.TokenizeRequest(text=LONG), "CONTEXT_LENGTH_EXCEEDED", "text"),
        ("Tokenize", api.TokenizeRequest(text=LONG * 5_000), "CONTEXT_LENGTH_EXCEEDED", "text"),
        ("Tokenize", api.TokenizeRequest(chat=LONG_CHAT), "CONTEXT_LENGTH_EXCEEDED", "chat.messages"),
        (
            "Detokenize",
            api.DetokenizeRequest(token_ids=LONG_IDS),
            "CONTEXT_LENGTH_EXCEEDED",
            "token_ids",
        ),
        ("Tokenize", api.TokenizeRequest(text="a", model="x"), "MODEL_NOT_FOUND", "model"),
        ("Tokenize", api.TokenizeRequest(chat=api.Chat()), "INVALID_FIELD", "chat.messages"),
        ("Tokenize", api.TokenizeRequest(chat=ROOT), "INVALID_FIELD", "chat.messages[0].role"),
        (
            "Generate",
            api.GenerateRequest(generation=api.Generation(chat=ROOT)),
            "INVALID_FIELD",
            "generation.chat.messages[0].role",
        ),
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
    path.write_text('[[keys]]\nkey = "the-key-of-alice"\ntenant = "alice"\nweight = 3\n')
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
        metadata = (("authorization", "Bearer the-key-of-alice"),)
        await quire.stub.Generate(api.GenerateRequest(generation=asking().generation), metadata=metadata)
        (submit,) = quire.scheduler.all("submit")
        assert (submit.tenant, submit.weight) == ("alice", 3.0)
        # Health needs no key.
        await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)


async def test_reflection_needs_a_key_where_other_calls_do(key_file: Path, model_directory: Path) -> None:
    async with running_gateway(model_directory, api_keys=key_file) as quire:
        for metadata in (None, (("authorization", "Bearer wrong"),)):
            for version in REFLECTION:
                method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
                first: Any = quire.channel.stream_stream(method)
                call = first(iter([LIST_SERVICES.SerializeToString()]), metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
                error = raised.value
                assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
        metadata = (("authorization", "Bearer the-key-of-alice"),)
        for version in REFLECTION:
            assert "quire.inference.v1.InferenceService" in await reflected(quire, version, metadata)


async def test_health_is_reported_per_service_and_reflection_shows_only_what_is_public(quire: Harness) -> None:
    health = health_pb2_grpc.HealthStub(quire.channel)
    for service in ("", "quire.inference.v1.InferenceService", "liveness"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listed = (await health.List(health_pb2.HealthListRequest())).statuses
    assert {"", "quire.inference.v1.InferenceService", "liveness"} <= listed.keys()
    assert {answer.status for answer in listed.values()} == {health_pb2.HealthCheckResponse.SERVING}
    for version in REFLECTION:
        names = await reflected(quire, version)
        assert "quire.inference.v1.InferenceService" in names
        assert not any(inner in name for inner in ("scheduler", "worker", "admin") for name in names)


async def reflected(quire: Harness, version: str, metadata: tuple[tuple[str, str], ...] | None = None) -> list[str]:
    """Names of the services that a version of reflection lists. Messages of both versions are the same."""
    list_services: Any = quire.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    async for answer in list_services(iter([LIST_SERVICES]), metadata=metadata):
        return [service.name for service in answer.list_services_response.service]
    return []


async def test_health_follows_the_scheduler(quire: Harness) -> None:
    quire.scheduler.session.status(None)
    await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await refused(quire.stub.ListModels(api.ListModelsRequest()))
    assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_READY")
    quire.scheduler.session.status(quire.scheduler.model)
    await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize(("request_id", "kind"), [(None, "cancel"), ("mine", "detach")])
async def test_an_answer_that_grpc_would_not_send_ends_when_it_is_too_long(
    request_id: str | None, kind: str, quire: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is not computed further, and one with a name can be resumed."""
    monkeypatch.setattr("gateway_svc.grpc_answers.PUBLIC_MESSAGE_BYTES", 1_000)

    def begin(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, [5] * 200, 0, logprobs=[worker_v1.TokenLogprobs(logprob=-0.5)] * 200)

    quire.scheduler.script = begin
    generation = api.Generation(text="a", logprobs=0, request_id=request_id)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await quire.stub.Generate(api.GenerateRequest(generation=generation))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(error.value) == ("MESSAGE_TOO_LARGE", "generation.logprobs")
    (submit,) = quire.scheduler.all("submit")
    assert (await quire.scheduler.next(kind)).key == submit.key


async def test_a_complete_answer_that_grpc_would_not_send_is_an_error(
    quire: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.grpc_answers.PUBLIC_MESSAGE_BYTES", 300)
    quire.scheduler.script = answer_with([5] * 200)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await quire.stub.Generate(api.GenerateRequest(generation=api.Generation(text="a")))
    assert reason_of(error.value) == ("MESSAGE_TOO_LARGE", "generation.stopping.max_tokens")
