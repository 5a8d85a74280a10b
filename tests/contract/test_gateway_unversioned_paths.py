"""OpenAI's routes by their paths without /v1, as llama.cpp has them."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.asyncio.client import connect

from gateway_harness import Harness, encoded, running_gateway
from gateway_svc.settings import BadSetting
from official_client import official_client
from openai_paths import is_of_openai
from scripted_scheduler import answer_with
from tiny_model import EOS

HELLO = encoded("hello world")
KEYS = '[[keys]]\nkey = "the-own-key-of-alice"\ntenant = "alice"\nmax_running = 3\n'
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def keyed(model_directory: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    async with running_gateway(model_directory, api_keys=path) as quire:
        quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
        yield quire


async def test_openais_client_may_have_a_base_url_without_the_version(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    async with official_client(quire, path="") as client:
        (model,) = (await client.models.list()).data
        assert (await client.models.retrieve(model.id)).id == model.id
        completion = await client.completions.create(model=model.id, prompt="a")
        assert completion.choices[0].text == "hello world"
        chat = await client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "a"}])
        assert chat.choices[0].message.content == "hello world"
        response = await client.responses.create(model=model.id, input="a")
        assert response.output_text == "hello world"
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(f"resp_{'0' * 48}")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model=model.id, prompt="a", max_tokens=0.5)  # type: ignore[call-overload]


async def test_all_of_openais_routes_and_no_others_have_such_paths(keyed: Harness) -> None:
    """Where keys are required, they are for these paths too."""
    document = (await keyed.http.get("/openapi.json")).json()
    found, expected = set(), set()
    for path, methods in document["paths"].items():
        if not path.startswith("/v1/") or path.removeprefix("/v1") in document["paths"]:
            continue
        for method in methods:
            response = await keyed.http.request(method, re.sub("{.*?}", "a", path.removeprefix("/v1")))
            assert response.status_code in (401, 404)
            if response.status_code == 401:
                found.add(path)
        if is_of_openai(path):
            expected.add(path)
    assert found == expected
    assert len(found) > 6
    assert not keyed.scheduler.all("submit")


async def test_what_a_key_allows_holds_there(keyed: Harness) -> None:
    headers = {"authorization": "Bearer the-own-key-of-alice"}
    bodies: dict[str, dict[str, Any]] = {
        "/completions": {"prompt": "a"},
        "/chat/completions/": {"messages": MESSAGES},
        "/responses": {"input": "a"},
    }
    for path, body in bodies.items():
        refused = await keyed.http.post(path, json=body | {"priority": 1}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert (await keyed.http.post(path, json=body, headers=headers)).status_code == 200
    assert [(one.tenant, one.limits.max_running) for one in keyed.scheduler.all("submit")] == [("alice", 3)] * 3


async def test_metrics_have_one_label_for_both_paths(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    for path in ("/completions", "/v1/completions"):
        assert (await quire.http.post(path, json={"prompt": "a"})).status_code == 200
    metrics = (await quire.http.get("/metrics")).text
    assert 'method="/completions"' not in metrics
    assert re.search(r'quire_gateway_requests_total{[^}]*method="/v1/completions"[^}]*} 2.0', metrics)


async def test_websockets_have_such_paths(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    async with connect(f"ws://127.0.0.1:{quire.gateway.http_port}/chat/completions", proxy=None) as connection:
        await connection.send(json.dumps({"messages": MESSAGES}))
        answer = json.loads(await connection.recv())
    assert answer["choices"][0]["message"]["content"] == "hello world"


async def test_they_are_found_below_the_root_path_and_it_is_not_the_beginning_of_one(model_directory: Path) -> None:
    async with running_gateway(model_directory, root_path="/llm") as quire:
        assert (await quire.http.get("/llm/models")).status_code == 200
    with pytest.raises(BadSetting, match="QUIRE_ROOT_PATH"):
        async with running_gateway(model_directory, root_path="/chat"):
            pass
