"""How a gateway drains: it reports NOT_SERVING, rejects calls, waits for running requests, and fails the others."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway_harness import Harness, encoded, gateway_at, reason_of, rest_of, running_gateway, scheduler_model
from ports import lasting_port
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedScheduler, length_end, serving

REQUEST = api.StreamGenerateRequest(generation=api.Generation(text="hello"))
NAMED = api.StreamGenerateRequest(generation=api.Generation(text="hello", request_id="mine"))


async def begun(quire: Harness, request: api.StreamGenerateRequest = REQUEST) -> tuple[Any, scheduler_v1.Submit]:
    """A stream that is accepted, and its submission."""
    call = quire.stub.StreamGenerate(request)
    submit = await quire.scheduler.next("submit")
    quire.scheduler.session.accept(submit.key)
    await call.read()
    return call, submit


async def test_new_work_is_refused_and_running_work_ends(model_directory: Path) -> None:
    async with running_gateway(model_directory, drain_grace=30) as quire:
        call, submit = await begun(quire)
        health = health_pb2_grpc.HealthStub(quire.channel)
        stopping = asyncio.create_task(quire.gateway.stop())
        await quire.wait_for_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await quire.stub.Generate(api.GenerateRequest(generation=REQUEST.generation))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(refusal.value)[0] == "DRAINING"
        refused = await quire.http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await quire.stub.Resume(api.ResumeRequest(request_id="mine")).read()
        assert reason_of(refusal.value)[0] == "DRAINING"
        assert (await quire.http.get("/health")).status_code == 503
        assert (await quire.http.get("/live")).status_code == 200
        live = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert live.status == health_pb2.HealthCheckResponse.SERVING
        quire.scheduler.session.tokens(submit.key, encoded("hello"), 0, end=length_end())
        chunk, usage = await call.read(), await call.read()
        assert (chunk.chunk.text, usage.usage.completion_tokens) == ("hello", 1)
        await stopping


@pytest.mark.parametrize(("request_", "kind"), [(REQUEST, "cancel"), (NAMED, "detach")])
async def test_requests_that_outlast_the_grace_fail_and_are_detached(
    request_: api.StreamGenerateRequest, kind: str, model_directory: Path
) -> None:
    async with running_gateway(model_directory, drain_grace=0.01) as quire:
        call, submit = await begun(quire, request_)
        stopping = asyncio.create_task(quire.gateway.stop())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert reason_of(error.value)[0] == "DRAINING"
        assert (await quire.scheduler.next(kind)).key == submit.key
        await stopping


async def test_a_detached_request_continues_at_another_gateway(model_directory: Path) -> None:
    async with running_gateway(model_directory, drain_grace=0.01) as first:
        call, submit = await begun(first, NAMED)
        first.scheduler.session.tokens(submit.key, encoded("hello"), 0)
        await call.read()
        addresses = [first.scheduler.address]
        async with gateway_at(first.scheduler, model_directory, addresses) as second:
            await second.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            stopping = asyncio.create_task(first.gateway.stop())
            assert (await first.scheduler.next("detach")).key == submit.key
            known = scheduler_v1.Tokens(token_ids=encoded("hello world"), end=length_end())
            first.scheduler.attach_script = lambda session, attach: session.attached(submit, known)
            position = api.Position(index=0, next_offset=len(encoded("hello")))
            rest = second.stub.Resume(api.ResumeRequest(request_id="mine", positions=[position]))
            _, event, _ = await rest_of(rest)
            assert event.chunk.text == " world"
            await stopping


async def test_a_stream_over_http_that_outlasts_the_grace_ends_in_an_error(model_directory: Path) -> None:
    async with running_gateway(model_directory, drain_grace=0.01) as quire:
        quire.scheduler.script = lambda session, submit: session.accept(submit.key)
        async with quire.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            stopping = asyncio.create_task(quire.gateway.stop())
            text = (await response.aread()).decode()
        assert '"code":"draining"' in text
        assert "[DONE]" not in text
        await stopping


async def test_a_gateway_serves_once_a_scheduler_is_there(model_directory: Path) -> None:
    first = ScriptedScheduler(scheduler_model(model_directory))
    async with serving(first, lasting_port()):
        address = first.address
    async with gateway_at(first, model_directory, [address]) as quire:
        assert (await quire.http.get("/health")).status_code == 503
        async with serving(first, int(address.rsplit(":", 1)[1])):
            await quire.wait_for_health(health_pb2.HealthCheckResponse.SERVING)
            assert (await quire.http.get("/health")).status_code == 200
