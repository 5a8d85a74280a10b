"""Requests that a scheduler rejects, over both protocols: the reason, and when to retry."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from gateway_harness import Harness, reason_of
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire_client import AsyncClient, QuireError

GENERATION = api.Generation(text="hello")


async def refused(quire: Harness) -> list[grpc.aio.AioRpcError]:
    """The errors of both calls that generate."""
    errors = []
    for call in (
        quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=GENERATION)).read(),
        quire.stub.Generate(api.GenerateRequest(generation=GENERATION)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        errors.append(error.value)
    return errors


@pytest.mark.parametrize(
    ("reason", "code", "expected"),
    [
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, "CAPACITY_EXHAUSTED"),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA_EXCEEDED"),
        (scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE, grpc.StatusCode.UNAVAILABLE, "DEADLINE_TOO_SHORT"),
    ],
)
async def test_a_rejected_call_has_a_time_to_retry(
    reason: scheduler_v1.FailureReason, code: grpc.StatusCode, expected: str, quire: Harness
) -> None:
    wait = Duration(seconds=7, nanos=500_000_000)
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why", wait)
    for error in await refused(quire):
        assert (error.code(), reason_of(error)[0]) == (code, expected)
        metadata = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay == wait
        assert metadata["grpc-retry-pushback-ms"] == "-1"  # a channel would retry at once, and again


async def test_a_deadline_that_is_too_short_by_itself_has_no_later(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why")
    for error in await refused(quire):
        metadata = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        assert not any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
        assert metadata["grpc-retry-pushback-ms"] == "-1"
    response = await quire.http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")
    assert "retry-after" not in response.headers


async def test_the_error_of_a_tenant_over_quota_names_the_tenant(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "9 requests wait")
    for error in await refused(quire):
        details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
        (quota,) = [
            error_details_pb2.QuotaFailure.FromString(detail.value)
            for detail in status_pb2.Status.FromString(details).details
            if detail.Is(error_details_pb2.QuotaFailure.DESCRIPTOR)
        ]
        assert [(one.subject, one.description) for one in quota.violations] == [("tenant:default", "9 requests wait")]


@pytest.mark.parametrize(
    ("reason", "field"),
    [
        (scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, "generation.beam_search.width"),
        (scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS, "generation.stopping.max_tokens"),
        (scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, "generation.stopping.max_tokens"),
    ],
)
async def test_what_a_refusal_is_about_is_named(reason: scheduler_v1.FailureReason, field: str, quire: Harness) -> None:
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "why")
    for error in await refused(quire):
        assert (error.code(), reason_of(error)[1]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_wait_that_is_short_is_left_to_the_channel(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNAVAILABLE
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason)
    for error in await refused(quire):
        assert "grpc-retry-pushback-ms" not in dict(error.trailing_metadata() or ())


@pytest.mark.parametrize(("seconds", "num_tries"), [(7, 1), (0, 4)])
async def test_our_client_comes_back_by_itself_only_where_that_is_soon(
    seconds: int, num_tries: int, quire: Harness
) -> None:
    reason = scheduler_v1.FAILURE_REASON_UNAVAILABLE
    wait = Duration(seconds=seconds)
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "", wait)
    async with AsyncClient(f"127.0.0.1:{quire.gateway.grpc_port}") as client:
        with pytest.raises(QuireError) as error:
            await client.generate("hello")
    assert (error.value.reason, error.value.retry_after) == ("CAPACITY_EXHAUSTED", seconds)
    assert len(quire.scheduler.all("submit")) == num_tries


@pytest.mark.parametrize("wait", [None, Duration(seconds=1)], ids=["never", "soon"])
async def test_our_client_never_comes_back_with_a_deadline_that_was_too_short(
    wait: Duration | None, quire: Harness
) -> None:
    reason = scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "", wait)
    async with AsyncClient(f"127.0.0.1:{quire.gateway.grpc_port}") as client:
        with pytest.raises(QuireError) as error:
            await client.generate("hello")
    assert error.value.reason == "DEADLINE_TOO_SHORT"
    assert error.value.retry_after == (wait and wait.seconds)
    assert len(quire.scheduler.all("submit")) == 1


async def test_the_predicted_wait_is_when_to_come_back(quire: Harness) -> None:
    reason = scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
    wait = Duration(seconds=12, nanos=300_000_000)
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "too much is queued", wait)
    response = await quire.http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    assert response.json()["error"]["message"] == "too much is queued"
