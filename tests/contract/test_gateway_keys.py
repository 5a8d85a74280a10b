"""What an API key allows, over both protocols."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway_calls import asking, refused
from gateway_harness import Harness, encoded, reason_of, running_gateway
from gateway_svc.key_file import KeyFile
from quire.inference.v1 import inference_pb2 as api
from quire.open_inference.v2 import open_inference_pb2 as open_inference
from quire.open_inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from responses_api import record
from scripted_scheduler import answer_with
from tiny_model import EOS
from token_issuer import AUDIENCE, ISSUER, TokenIssuer

KEYS = """
[[keys]]
key = "the-own-key-of-alice"
tenant = "alice"

[[keys]]
key = "the-own-key-of-a-batch"
tenant = "alice"
name = "batch"
max_priority = -2
max_running = 4

[[keys]]
key = "the-own-key-of-an-operator"
tenant = "operators"
max_priority = 2147483647

[[keys]]
key = "the-own-key-of-bob"
tenant = "bob"
models = ["another"]
"""


@pytest.fixture
async def keyed(model_directory: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    async with running_gateway(model_directory, api_keys=path, gateway_metrics_port=0) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        yield quire


def bearer(who: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer the-own-key-of-{who}"),)


@pytest.mark.parametrize(
    ("who", "priority", "most"),
    [
        ("alice", 1, 0),
        ("alice", 2**31 - 1, 0),
        ("a-batch", 0, -2),
    ],
)
async def test_a_priority_above_that_of_the_key_is_refused(keyed: Harness, who: str, priority: int, most: int) -> None:
    generation = asking(priority=priority).generation
    error = await refused(keyed.stub.Generate(api.GenerateRequest(generation=generation), metadata=bearer(who)))
    assert (error.code(), *reason_of(error)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        "generation.priority",
    )
    body = {"prompt": "a", "priority": priority}
    response = await keyed.http.post("/v1/completions", json=body, headers={"x-api-key": f"the-own-key-of-{who}"})
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == ("priority", "invalid_field")
    assert f"must be at most {most}" in response.json()["error"]["message"]
    assert keyed.scheduler.all("submit") == []


@pytest.mark.parametrize(
    ("who", "priority", "sent"),
    [("alice", None, 0), ("alice", -7, -7), ("a-batch", None, -2), ("a-batch", -2, -2), ("an-operator", 9, 9)],
)
async def test_other_priorities_are_sent_on(keyed: Harness, who: str, priority: int | None, sent: int) -> None:
    body = {"prompt": "a"} | ({} if priority is None else {"priority": priority})
    response = await keyed.http.post("/v1/completions", json=body, headers={"api-key": f"the-own-key-of-{who}"})
    assert response.status_code == 200
    (submit,) = keyed.scheduler.all("submit")
    assert submit.priority == sent


async def test_without_a_key_file_any_priority_may_be_used(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "priority": 2**31 - 1})
    assert response.status_code == 200
    (submit,) = quire.scheduler.all("submit")
    assert (submit.priority, submit.HasField("limits")) == (2**31 - 1, False)


async def test_the_limits_of_the_account_are_submitted(keyed: Harness) -> None:
    for who in ("alice", "a-batch"):
        await keyed.stub.Generate(
            api.GenerateRequest(generation=asking().generation), metadata=(("x-api-key", f"the-own-key-of-{who}"),)
        )
    first, second = keyed.scheduler.all("submit")
    assert (first.tenant, second.tenant) == ("alice", "alice")
    assert first.limits == scheduler_v1.AccountLimits(account="alice/")
    assert second.limits == scheduler_v1.AccountLimits(account="alice/batch", max_running=4)


@pytest.mark.parametrize("limit", ["max_queued", "requests_per_minute"])
async def test_a_call_of_more_inputs_than_the_key_ever_allows_names_the_first_one_beyond(
    model_directory: Path, tmp_path: Path, limit: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\n{limit} = 3\n')
    chat = [{"role": "user", "content": "hello"}]
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": ["a"] * 4}, "prompt[3]"),
        ("/v1/embeddings", {"input": ["a"] * 4}, "input[3]"),
        ("/v1/chat/completions/batch", {"messages": [chat] * 4}, "messages[3]"),
        ("/rerank", {"query": "a", "documents": ["b", "c", "d"]}, "documents[2]"),  # the query is computed, too
        ("/score", {"text_1": "a", "text_2": ["b", "c", "d"]}, "text_2[2]"),
    ]
    async with running_gateway(model_directory, api_keys=path) as quire:
        for route, body, field in calls:
            response = await quire.http.post(route, json=body, headers=dict(bearer("alice")))
            error = response.json().get("error", response.json())
            assert (response.status_code, error["code"], error["param"]) == (400, "invalid_field", field), route
            assert f"4 inputs, and {limit} of the API key is 3" in error["message"]
        assert quire.scheduler.all("submit") == []
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        for num_prompts in (3, 1):
            body = {"prompt": ["a"] * num_prompts}
            assert (await quire.http.post("/v1/completions", json=body, headers=dict(bearer("alice")))).is_success
        submits = quire.scheduler.all("submit")
        is_counted = limit == "requests_per_minute"
        assert [one.call.num_requests for one in submits] == ([3] * 3 if is_counted else [0] * 3) + [0]
        assert len({one.call.id for one in submits[:3]}) == 1


async def test_a_model_that_the_key_may_not_use_does_not_exist_for_it(keyed: Harness) -> None:
    headers, metadata = {"x-api-key": "the-own-key-of-bob"}, bearer("bob")
    assert (await keyed.http.get("/v1/models", headers=headers)).json()["data"] == []
    assert list((await keyed.stub.ListModels(api.ListModelsRequest(), metadata=metadata)).models) == []
    names = {card["id"] for card in (await keyed.http.get("/v1/models", headers=dict(bearer("alice")))).json()["data"]}
    assert names == {"tiny"}
    answers = [
        [
            await keyed.http.get(f"/v1/models/{name}", headers=headers),
            await keyed.http.post("/v1/completions", json={"model": name, "prompt": "a"}, headers=headers),
        ]
        for name in ("tiny", "no-such-model")
    ]
    for of_hidden, of_unknown in zip(*answers, strict=True):
        assert (of_hidden.status_code, of_hidden.json()) == (404, of_unknown.json())
        assert "tiny" not in of_hidden.text
    for call in (
        keyed.stub.Generate(api.GenerateRequest(generation=asking().generation), metadata=metadata),
        keyed.stub.Tokenize(api.TokenizeRequest(text="a"), metadata=metadata),
        keyed.stub.Detokenize(api.DetokenizeRequest(token_ids=[1]), metadata=metadata),
    ):
        error = await refused(call)
        assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert keyed.scheduler.all("submit") == []


async def test_a_request_of_a_model_that_the_key_may_not_use_does_not_exist_for_it(
    model_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    restricted = '[[keys]]\nkey = "the-own-key-of-a-guest"\ntenant = "alice"\nname = "guest"\nmodels = ["another"]\n'
    path.write_text(KEYS + restricted)
    async with running_gateway(model_directory, api_keys=path) as quire:
        quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
        headers = dict(bearer("alice"))
        response = (await quire.http.post("/v1/responses", json={"input": "hello"}, headers=headers)).json()
        submit = await quire.scheduler.next("submit")
        quire.scheduler.records[submit.key] = record(submit, "hello")
        quire.scheduler.attach_script = lambda session, attach: session.attached(submit)
        for who, status in (("a-guest", 404), ("alice", 200)):
            url = f"/v1/responses/{response['id']}"
            found = await quire.http.get(url, headers=dict(bearer(who)))
            assert found.status_code == status
        hidden = await quire.http.get(url, headers=dict(bearer("a-guest")))
        unknown = await quire.http.get(f"{url[:-4]}beef", headers=dict(bearer("a-guest")))
        assert hidden.text == unknown.text.replace(f"{url[:-4]}beef".rpartition("/")[2], response["id"])
        deleted = await quire.http.delete(url, headers=dict(bearer("a-guest")))
        assert (deleted.status_code, quire.scheduler.all("delete")) == (404, [])

        resumed = quire.stub.Resume(api.ResumeRequest(request_id=response["id"]), metadata=bearer("a-guest"))
        error = await refused(resumed.read())
        assert (error.code(), reason_of(error)[0]) == (grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")
        await quire.scheduler.next("detach")
        assert quire.scheduler.all("cancel") == []


async def test_two_different_keys_in_one_call_are_refused(keyed: Harness) -> None:
    headers = {"authorization": "Bearer the-own-key-of-alice", "x-api-key": "the-own-key-of-bob"}
    response = await keyed.http.get("/v1/models", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthenticated")
    error = await refused(keyed.stub.ListModels(api.ListModelsRequest(), metadata=tuple(headers.items())))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    twice = (*bearer("alice"), *bearer("bob"))
    error = await refused(keyed.stub.ListModels(api.ListModelsRequest(), metadata=twice))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_new_key_is_taken_and_a_revoked_one_is_not_without_a_restart(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svc_common.files.RELOAD_SECONDS", 0.01)
    path, table = tmp_path / "keys.toml", '[[keys]]\nkey = "{}"\ntenant = "a"\nname = "web"\n'
    path.write_text(table.format("the-first-key-of-a"))
    async with running_gateway(model_directory, api_keys=path) as quire:

        async def status(key: str) -> int:
            return (await quire.http.get("/v1/models", headers={"x-api-key": key})).status_code

        assert [await status(key) for key in ("the-first-key-of-a", "the-second-key-of-a")] == [200, 401]
        path.write_text(table.format("the-second-key-of-a"))
        async with asyncio.timeout(60):
            while await status("the-first-key-of-a") == 200:
                await asyncio.sleep(0.01)
        assert await status("the-second-key-of-a") == 200


async def test_each_message_of_a_stream_needs_a_key_that_is_valid_then(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream may stay open for long after its key was removed. A request that runs then continues."""
    monkeypatch.setattr("svc_common.files.RELOAD_SECONDS", 0.01)
    path, table = tmp_path / "keys.toml", '[[keys]]\nkey = "the-own-key-of-{}"\ntenant = "{}"\n{}\n'
    path.write_text(table.format("alice", "alice", ""))
    request = open_inference.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    async with running_gateway(model_directory, api_keys=path) as quire:

        async def until(status: int) -> None:
            async with asyncio.timeout(60):
                while (await quire.http.get("/v1/models/tiny", headers=dict(bearer("alice")))).status_code != status:
                    await asyncio.sleep(0.01)

        stream: Any = GRPCInferenceServiceStub(quire.channel).ModelStreamInfer(metadata=bearer("alice"))
        await stream.write(request)
        running = await quire.scheduler.next("submit")
        answer = quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        path.write_text(table.format("alice", "alice", 'models = ["another"]'))
        await until(404)
        await stream.write(request)
        assert "model" in (await stream.read()).error_message
        path.write_text(table.format("bob", "bob", ""))
        await until(401)
        await stream.write(request)
        assert "key" in (await stream.read()).error_message
        answer(quire.scheduler.session, running)
        assert (await stream.read()).infer_response.outputs
        assert len(quire.scheduler.all("submit")) == 1
        stream.cancel()


async def test_failed_logins_are_counted_once_for_each_call(keyed: Harness) -> None:
    await keyed.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "the-key-of-nobody"})
    await keyed.http.get("/v1/models")
    await refused(keyed.stub.Generate(api.GenerateRequest(generation=asking().generation), metadata=bearer("nobody")))
    await refused(keyed.stub.ListModels(api.ListModelsRequest(), metadata=(*bearer("alice"), *bearer("bob"))))
    page = (await keyed.http.get(f"http://127.0.0.1:{keyed.gateway.metrics_port}/metrics")).text
    counts = sorted(line for line in page.splitlines() if line.startswith("quire_gateway_failed_logins_total{"))
    assert counts == [
        'quire_gateway_failed_logins_total{protocol="grpc",reason="conflicting"} 1.0',
        'quire_gateway_failed_logins_total{protocol="grpc",reason="unknown"} 1.0',
        'quire_gateway_failed_logins_total{protocol="http",reason="missing"} 1.0',
        'quire_gateway_failed_logins_total{protocol="http",reason="unknown"} 1.0',
    ]


async def test_a_refused_login_names_the_scheme(keyed: Harness) -> None:
    refused_login = await keyed.http.get("/v1/models")
    assert (refused_login.status_code, refused_login.headers["www-authenticate"]) == (401, "Bearer")
    answered = await keyed.http.get("/v1/models", headers=dict(bearer("alice")))
    assert "www-authenticate" not in answered.headers


async def test_the_logged_address_of_a_client_is_not_what_it_states(
    keyed: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await keyed.http.get("/v1/models", headers={"x-forwarded-for": "10.9.8.7, a text"})
    (logged,) = [one for one in caplog.records if one.getMessage() == "calls without a valid credential"]
    assert logged.__dict__["peer"].startswith("127.0.0.1:")


async def test_a_token_of_the_issuer_is_a_credential_over_both_protocols(model_directory: Path, tmp_path: Path) -> None:
    issuer, path = TokenIssuer(), tmp_path / "keys.toml"
    (tmp_path / "jwks.json").write_text(issuer.key_set())
    path.write_text(
        f'{KEYS}[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\ntenant_claim = "tenant"\n'
        "max_running = 3\n"
    )
    async with running_gateway(model_directory, api_keys=path) as quire:
        quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
        metadata = (("authorization", f"Bearer {issuer.token()}"),)
        await quire.stub.Generate(api.GenerateRequest(generation=asking().generation), metadata=metadata)
        response = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=dict(metadata))
        assert response.status_code == 200
        for submit in quire.scheduler.all("submit"):
            assert submit.tenant == "search"
            assert submit.limits == scheduler_v1.AccountLimits(account="search/jwt:", max_running=3)
        assert (await quire.http.get("/v1/models", headers=dict(bearer("alice")))).status_code == 200
        late = {"authorization": f"Bearer {issuer.token(exp=1)}"}
        response = await quire.http.get("/v1/models", headers=late)
        assert (response.status_code, response.json()["error"]["message"]) == (401, "the token has expired")
        error = await refused(quire.stub.ListModels(api.ListModelsRequest(), metadata=(("x-api-key", "a.b.c"),)))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_keys_that_raise_any_exception_end_no_gateway(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: KeyFile) -> None:
        raise RuntimeError("unexpected")

    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    monkeypatch.setattr("svc_common.files.RELOAD_SECONDS", 0.01)
    monkeypatch.setattr(KeyFile, "refresh_signing_keys", fail)
    async with running_gateway(model_directory, api_keys=path) as quire:
        async with asyncio.timeout(60):
            while caplog.text.count("RuntimeError: unexpected") < 3:
                await asyncio.sleep(0.01)
        path.write_text(KEYS.replace("of-alice", "of-carol"))
        async with asyncio.timeout(60):
            while (await quire.http.get("/v1/models", headers=dict(bearer("carol")))).status_code != 200:
                await asyncio.sleep(0.01)


async def test_the_document_of_the_api_needs_no_key_and_names_no_model(keyed: Harness) -> None:
    for path in ("/openapi.json", "/docs"):
        response = await keyed.http.get(path)
        assert response.status_code == 200
        assert "tiny" not in response.text
        assert "alice" not in response.text
    document = (await keyed.http.get("/openapi.json")).json()
    assert "/metrics" not in document["paths"]
    assert {} not in document["paths"]["/v1/completions"]["post"]["security"]
