"""What an operator sets for the HTTP API: its path behind a proxy, the usage of streams, keys."""

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_harness import encoded, running_gateway
from gateway_svc.settings import BadSetting
from quire.inference.v1 import inference_pb2
from quire.open_inference.v2 import open_inference_pb2
from scripted_scheduler import answer_with
from sse import DONE, events_of
from tiny_model import EOS

HELLO = encoded("hello world")


async def test_calls_are_answered_with_and_without_the_root_path(model_directory: Path) -> None:
    async with running_gateway(model_directory, root_path="/llm/a") as quire:
        quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
        for prefix in ("", "/llm/a"):
            response = await quire.http.post(f"{prefix}/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert response.json()["choices"][0]["text"] == "hello world"
        assert (await quire.http.get("/llm/v1/models")).status_code == 404
        assert (await quire.http.get("/llm/ab/v1/models")).status_code == 404
        document = (await quire.http.get("/llm/a/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm/a"}]
        metrics = (await quire.http.get("/llm/a/metrics")).text
        assert 'method="/v1/completions"' in metrics
        assert "/llm" not in metrics


async def test_web_pages_may_ask_below_the_root_path(model_directory: Path) -> None:
    origin = "https://chat.example"
    async with running_gateway(model_directory, root_path="/llm", cors_origins=origin) as quire:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        for path in ("/v1/completions", "/llm/v1/completions"):
            answer = await quire.http.options(path, headers=asked)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)


@pytest.mark.parametrize("root_path", ["/v1", "/api", "/live", "/v1/chat/completions"])
async def test_a_root_path_is_not_the_beginning_of_a_route(model_directory: Path, root_path: str) -> None:
    with pytest.raises(BadSetting, match="QUIRE_ROOT_PATH"):
        async with running_gateway(model_directory, root_path=root_path):
            pass


async def test_an_operator_may_have_the_usage_in_every_stream(model_directory: Path) -> None:
    async with running_gateway(model_directory, stream_usage=True) as quire:
        for options in (None, {"include_usage": False}):
            quire.scheduler.script = answer_with(HELLO)
            body = {"prompt": "a", "stream": True, "stream_options": options, "max_tokens": 2}
            *events, last, done = events_of((await quire.http.post("/v1/completions", json=body)).text)
            assert done == DONE
            assert [event["usage"]["prompt_tokens"] for event in events] == [1] * len(events)
            numbers = [event["usage"]["completion_tokens"] for event in events]
            assert numbers == sorted(numbers)
            assert numbers[-1] == 2
            assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)


async def test_an_operator_may_have_tokens_named_by_their_ids(model_directory: Path) -> None:
    async with running_gateway(model_directory, tokens_as_token_ids=True) as quire:
        for asked, is_named in ((None, True), (True, True), (False, False)):
            quire.scheduler.script = answer_with(HELLO)
            body = {"prompt": "a", "logprobs": 0, "max_tokens": 2, "return_tokens_as_token_ids": asked}
            logprobs = (await quire.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
            named = [token.startswith("token_id:") for token in logprobs["tokens"]]
            assert named == [is_named] * len(HELLO)


async def test_a_key_is_needed_where_it_should_be(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-key-of-alice"\ntenant = "alice"\nweight = 3\n')
    async with running_gateway(model_directory, api_keys=keys) as quire:
        quire.scheduler.script = answer_with(HELLO)
        document = (await quire.http.get("/openapi.json")).json()
        open_to_all = set()
        for path, methods in document["paths"].items():
            for method in methods:
                response = await quire.http.request(method, re.sub("{.*?}", "a", path))
                if response.status_code == 401:
                    assert response.headers["content-type"] == "application/json"
                else:
                    open_to_all.add(path)
        assert open_to_all == {"/", "/health", "/live", "/ping", "/openapi.json", "/docs"}
        response = await quire.http.post("/v1/completions")
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        for path in ("/health", "/live"):
            assert (await quire.http.get(path)).status_code == 200
        headers = {"authorization": "Bearer the-key-of-alice"}
        assert (await quire.http.get("/version", headers=headers)).status_code == 200
        assert (await quire.http.get("/v1/models", headers=headers)).status_code == 200
        await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        (submit,) = quire.scheduler.all("submit")
        assert (submit.tenant, submit.weight) == ("alice", 3.0)


async def code_of(channel: Any, method: str, *, streams_requests: bool) -> grpc.StatusCode:
    """How a call without metadata ends. Nothing is written to a stream of requests: if the server has ended the call by
    then, grpcio calls that an internal error.
    """
    call = channel.stream_stream(method)() if streams_requests else channel.unary_unary(method)(b"")
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_grpc_call_without_a_key_has_no_answer_but_of_health(model_directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-key-of-alice"\ntenant = "alice"\n')
    contracts = (inference_pb2, open_inference_pb2)
    services = [service for contract in contracts for service in contract.DESCRIPTOR.services_by_name.values()]
    methods = {
        f"/{service.full_name}/{method.name}": method.client_streaming
        for service in services
        for method in service.methods
    }
    for version in ("v1", "v1alpha"):
        methods[f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"] = True
    assert len(methods) > 10
    async with running_gateway(model_directory, api_keys=keys) as quire:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{quire.gateway.grpc_port}") as opened:
            channel: Any = opened
            codes = {
                method: await code_of(channel, method, streams_requests=streams) for method, streams in methods.items()
            }
            probes = [f"/inference.GRPCInferenceService/Server{what}" for what in ("Live", "Ready")]
            refused = dict.fromkeys(methods, grpc.StatusCode.UNAUTHENTICATED)
            assert codes == refused | dict.fromkeys(probes, grpc.StatusCode.OK)
            assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert not quire.scheduler.all("submit")


async def test_metrics_show_a_tenant_nothing_of_others(model_directory: Path, tmp_path: Path) -> None:
    """Where keys are required, they are on a port of their own, which asks for no key."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "the-key-of-alice"\ntenant = "alice"\n')
    async with running_gateway(model_directory, api_keys=keys, gateway_metrics_port=0) as quire:
        for headers in ({}, {"authorization": "Bearer the-key-of-alice"}):
            assert (await quire.http.get("/metrics", headers=headers)).status_code == 404
        port = f"http://127.0.0.1:{quire.gateway.metrics_port}"
        page = await quire.http.get(f"{port}/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert 'quire_gateway_requests_in_flight{model="tiny"} 0.0' in page.text
        assert [(await quire.http.get(f"{port}{path}")).status_code for path in ("/live", "/health")] == [200, 200]
    async with running_gateway(model_directory, api_keys=keys) as quire:
        assert quire.gateway.metrics_port is None


@pytest.mark.parametrize("most", [None, 0, 128])
async def test_an_operator_bounds_log_probabilities(model_directory: Path, most: int | None) -> None:
    settings = {} if most is None else {"max_logprobs": most}
    most = 20 if most is None else most
    async with running_gateway(model_directory, **settings) as quire:
        quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
        for path, body, name in (
            ("/v1/completions", {"prompt": "a"}, "logprobs"),
            ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "prompt_logprobs"),
            ("/v1/chat/completions", chat, "top_logprobs"),
        ):
            refused = await quire.http.post(path, json=body | {name: most + 1})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, name)
            assert f"must be between 0 and {most}" in error["message"]
        await quire.http.post("/v1/completions", json={"prompt": "a", "logprobs": most, "prompt_logprobs": most})
        (submit,) = quire.scheduler.all("submit")
        assert (submit.sampling.logprobs, submit.result.prompt_logprobs.num_top_logprobs) == (most, most)
