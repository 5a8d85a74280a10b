"""What ends calls for embeddings, limits them and outlasts them; and their traces."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from embedding_calls import LIMITS, TEXTS, VECTORS, asking, begun, leave, until_submitted, vector_of
from gateway_calls import refused
from gateway_harness import Harness, gateway_at, reason_of, running_gateway, scheduler_model
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, embed_with, serving, value_end
from svc_common.errors import Reason

KEYS = """
[[keys]]
key = "a-key-with-limits-0000"
tenant = "search"
max_running = 3
max_priority = -1
retention = "none"
"""


@pytest.fixture
async def quire(encoder_directory: Path) -> AsyncIterator[Harness]:
    """A gateway, new for each test."""
    async with running_gateway(encoder_directory, **LIMITS) as harness:
        yield harness


async def test_vectors_beyond_the_largest_message_are_refused_by_the_field(quire: Harness) -> None:
    quire.scheduler.script = embed_with(lambda _: [0.5] * 2**16)
    error = await refused(quire.stub.Embed(asking(*["a"] * 64)))  # 4 bytes for each number: 16 MiB
    assert reason_of(error) == ("MESSAGE_TOO_LARGE", "inputs")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, 503, grpc.StatusCode.UNAVAILABLE),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_if_one_input_fails_the_others_are_cancelled(
    protocol: str, reason: scheduler_v1.FailureReason, status: int, code: grpc.StatusCode, quire: Harness
) -> None:
    call = begun(protocol, quire, ["a", "b", "c"])
    first, second, third = await until_submitted(quire, 3)
    session = quire.scheduler.session
    for submit in (first, second, third):
        session.accept(submit.key)
    session.tokens(first.key, (), 0, end=value_end(1.0))
    session.fail(second.key, reason, "why")
    assert (await quire.scheduler.next("cancel")).key == third.key
    if protocol == "http":
        assert (await call).status_code == status
    else:
        assert (await refused(call)).code() is code
    assert [cancel.key for cancel in quire.scheduler.all("cancel")] == [third.key]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_client_that_leaves_cancels_its_inputs(protocol: str, quire: Harness) -> None:
    await leave(quire, begun(protocol, quire, TEXTS), 2)


async def test_a_deadline_ends_a_call(quire: Harness) -> None:
    started = time.monotonic()
    # The inputs reach the scheduler before that, also on a slow machine.
    answer = await quire.http.post("/v1/embeddings", json={"input": TEXTS}, headers={"x-request-timeout": "2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - started < 30
    for submit in await until_submitted(quire, 2):
        assert 0 < submit.time_left.ToNanoseconds() <= 2_000_000_000
    error = await refused(quire.stub.Embed(asking(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_call_outlives_its_scheduler(encoder_directory: Path) -> None:
    model = scheduler_model(encoder_directory, **LIMITS)
    async with serving(ScriptedScheduler(model)) as leader, serving(ScriptedScheduler(model, epoch=2)) as standby:
        standby.is_leader = False
        async with gateway_at(leader, encoder_directory, [leader.address, standby.address]) as quire:
            await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            call = quire.stub.Embed(asking())
            first, second = await until_submitted(quire, 2)
            for submit in (first, second):
                leader.session.accept(submit.key)
            leader.is_leader, standby.is_leader = False, True
            leader.session.close()
            # The new scheduler has a record of one input, and does not know the other one.
            attached = {(await standby.next("attach")).key for _ in range(2)}
            assert attached == {first.key, second.key}
            standby.session.attached(first, scheduler_v1.Tokens(end=value_end(*VECTORS[0])))
            standby.session.fail(second.key, scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST)
            again = await standby.next("submit")
            assert (again.key, again.submission_id) == (second.key, second.submission_id)
            assert again.was_accepted
            assert again.prompt_token_ids == second.prompt_token_ids
            standby.session.accept(second.key)
            standby.session.tokens(second.key, (), 0, end=value_end(*VECTORS[1]))
            assert [list(one.numbers) for one in (await call).embeddings] == VECTORS


async def test_limits_of_a_key_hold_for_each_input(encoder_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    headers = {"authorization": "Bearer a-key-with-limits-0000"}
    async with running_gateway(encoder_directory, api_keys=tmp_path / "keys.toml", **LIMITS) as quire:
        quire.scheduler.script = embed_with(vector_of)
        assert (await quire.http.post("/v1/embeddings", json={"input": TEXTS})).status_code == 401
        await quire.http.post("/v1/embeddings", json={"input": TEXTS}, headers=headers)
        for submit in quire.scheduler.all("submit"):
            assert (submit.tenant, submit.limits.max_running, submit.priority) == ("search", 3, -1)
            assert submit.retention.is_unrecorded
        for fields, field in (({"priority": 0}, "priority"), ({"retention": "until_end"}, "retention")):
            answer = await quire.http.post("/v1/embeddings", json={"input": "a", **fields}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the finished spans. Tracing is on as with an endpoint."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


async def spans_of(exporter: InMemorySpanExporter, path: str) -> tuple[ReadableSpan, ReadableSpan]:
    """The span of a call over HTTP, and the only other one."""
    async with asyncio.timeout(60):
        while len(spans := exporter.get_finished_spans()) < 2:
            await asyncio.sleep(0.01)
    (server,) = [span for span in spans if span.name == f"POST {path}"]
    (values,) = [span for span in spans if span is not server]
    return server, values


@pytest.mark.parametrize("num_texts", [1, 2, 70])
async def test_a_call_has_one_span_and_its_first_and_last_prompt_are_traced(
    num_texts: int, encoder_directory: Path, exporter: InMemorySpanExporter
) -> None:
    async with running_gateway(encoder_directory, **LIMITS) as quire:
        quire.scheduler.script = embed_with(vector_of)
        await quire.http.post("/v1/embeddings", json={"input": ["a b"] * num_texts})
        server, embeddings = await spans_of(exporter, "/v1/embeddings")
        assert embeddings.parent is not None
        assert server.context is not None
        assert embeddings.context is not None
        assert embeddings.parent.span_id == server.context.span_id
        attributes = dict(embeddings.attributes or {})
        assert (embeddings.name, attributes["gen_ai.operation.name"]) == ("embeddings tiny", "embeddings")
        assert attributes["quire.prompts"] == num_texts
        assert attributes["gen_ai.usage.input_tokens"] == 4 * num_texts
        assert attributes["gen_ai.embeddings.dimension.count"] == 4
        traced = [f"{embeddings.context.span_id:016x}" in one.traceparent for one in quire.scheduler.all("submit")]
        assert traced == [number in (0, num_texts - 1) for number in range(num_texts)]
        assert sum(not one.traceparent for one in quire.scheduler.all("submit")) == max(0, num_texts - 2)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_the_span_of_a_call_that_ends_early_says_why(
    is_cancelled: bool, encoder_directory: Path, exporter: InMemorySpanExporter
) -> None:
    async with running_gateway(encoder_directory, **LIMITS) as quire:
        call = asyncio.create_task(quire.http.post("/v1/embeddings", json={"input": TEXTS}))
        if is_cancelled:
            await leave(quire, call, 2)
        else:
            first, _ = await until_submitted(quire, 2)
            quire.scheduler.session.fail(first.key, scheduler_v1.FAILURE_REASON_UNAVAILABLE, "why")
            await call
        _, embeddings = await spans_of(exporter, "/v1/embeddings")
        expected = Reason.CANCELLED if is_cancelled else Reason.CAPACITY_EXHAUSTED
        assert dict(embeddings.attributes or {})["error.type"] == expected.value
        assert (embeddings.status.status_code is StatusCode.ERROR) == (not is_cancelled)


async def test_values_have_no_record_unless_a_call_asks_for_one(quire: Harness) -> None:
    quire.scheduler.script = embed_with(vector_of)
    for retention, is_unrecorded in ((None, True), ("until_end", False), (60, False)):
        await quire.http.post("/v1/embeddings", json={"input": "a", "retention": retention})
        (submit,) = await until_submitted(quire, 1)
        assert submit.retention.is_unrecorded is is_unrecorded


async def test_prompts_of_a_call_are_one_message(quire: Harness) -> None:
    quire.scheduler.script = embed_with(vector_of)
    await quire.scheduler.next("hello")
    num_before = quire.scheduler.num_messages
    await quire.http.post("/v1/embeddings", json={"input": ["a"] * 64})
    assert quire.scheduler.num_messages == num_before + 1


async def test_a_gateway_that_drains_waits_for_values(encoder_directory: Path) -> None:
    async with running_gateway(encoder_directory, drain_grace=60, **LIMITS) as quire:
        call = quire.stub.Embed(asking("a"))
        (submit,) = await until_submitted(quire, 1)
        quire.scheduler.session.accept(submit.key)
        stopping = asyncio.create_task(quire.gateway.stop())
        await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert reason_of(await refused(quire.stub.Embed(asking("a")))) == ("DRAINING", "")
        quire.scheduler.session.tokens(submit.key, (), 0, end=value_end(1.0))
        assert [list(one.numbers) for one in (await call).embeddings] == [[1.0]]
        await stopping
