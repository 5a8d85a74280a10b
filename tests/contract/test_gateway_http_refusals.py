"""Errors of the OpenAI-style API."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway_harness import Harness, encoded
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedSession, answer_with
from tiny_model import CONTEXT_LENGTH, EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
ROLE, CONTENT = "messages[0].role", "messages[0].content"


@pytest.fixture
def quire(shared: Harness) -> Harness:
    return shared


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (scheduler_v1.FAILURE_REASON_KEY_IN_USE, 409, "idempotency_key_reused"),
        (scheduler_v1.FAILURE_REASON_DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
        (scheduler_v1.FAILURE_REASON_CANCELLED, 499, "cancelled"),
        (scheduler_v1.FAILURE_REASON_UNAVAILABLE, 503, "capacity_exhausted"),
        (scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA, 429, "tenant_quota_exceeded"),
        (scheduler_v1.FAILURE_REASON_DEADLINE_INFEASIBLE, 503, "deadline_too_short"),
        (scheduler_v1.FAILURE_REASON_INTERNAL, 500, "internal"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_scheduler_is_a_status_even_for_a_stream(
    reason: scheduler_v1.FailureReason, status: int, code: str, stream: bool, quire: Harness
) -> None:
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason)
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (code in ("capacity_exhausted", "tenant_quota_exceeded"))
    assert ("x-should-retry" in response.headers) == (code == "deadline_too_short")


@pytest.mark.parametrize(
    ("path", "body", "reason", "param"),
    [
        ("completions", {"n": 2}, scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, "n"),
        ("completions", {"n": 2, "best_of": 3}, scheduler_v1.FAILURE_REASON_SEARCH_TOO_WIDE, "best_of"),
        ("completions", {"max_tokens": 3}, scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS, "max_tokens"),
        (
            "chat/completions",
            {"max_completion_tokens": 3},
            scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS,
            "max_completion_tokens",
        ),
        ("chat/completions", {}, scheduler_v1.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        ("completions", {}, scheduler_v1.FAILURE_REASON_INVALID, None),
    ],
)
async def test_what_the_scheduler_refuses_is_named_as_the_body_spelled_it(
    path: str, body: dict[str, Any], reason: scheduler_v1.FailureReason, param: str | None, quire: Harness
) -> None:
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, reason, "is too much")
    asked = (
        {"messages": MESSAGES} if path.startswith("chat") else {"prompt": ["a", "b"], "use_beam_search": "n" in body}
    )
    response = await quire.http.post(f"/v1/{path}", json={**asked, "temperature": 0, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == (f"{param}: is too much" if param else "is too much")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "86401", "1_0", "1e1"])
async def test_other_times_are_refused(seconds: str, quire: Harness) -> None:
    headers = {"x-request-timeout": seconds}
    response = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "invalid_field", "prompt"),
        ("/v1/completions", {}, 400, "invalid_field", "prompt"),
        ("/v1/chat/completions", {}, 400, "invalid_field", "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "root", "content": "a"}]}, 400, "invalid_field", ROLE),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}, 400, "invalid_field", CONTENT),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * CONTEXT_LENGTH},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "model_not_found", "model"),
        ("/v1/completions", {"prompt": [5] * CONTEXT_LENGTH}, 400, "context_length_exceeded", "prompt"),
        ("/v1/completions", {"prompt": [[5], [10**6]]}, 400, "invalid_field", "prompt[1][0]"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "invalid_field", "top_p"),
        ("/v1/completions", {"prompt": "a", "n": 0}, 400, "invalid_field", "n"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "invalid_field", "max_tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "feature_unsupported", "suffix"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 0},
            400,
            "invalid_field",
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}]}, 400, "invalid_field", "tools[0].function"),
    ],
)
async def test_bad_input_is_refused_by_field(
    path: str, body: dict[str, Any], status: int, code: str, param: str, quire: Harness
) -> None:
    response = await quire.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert not quire.scheduler.all("submit")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [5] * CONTEXT_LENGTH}, "prompt is too long"),
        ({"prompt": "a " * 17 * CONTEXT_LENGTH}, "prompt is too long"),
        ({"prompt": [5], "max_tokens": CONTEXT_LENGTH + 1}, "do not fit the context"),
    ],
)
async def test_what_does_not_fit_the_context_is_refused_in_words_that_clients_look_for(
    fields: dict[str, Any], words: str, quire: Harness
) -> None:
    response = await quire.http.post("/v1/completions", json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert words in error["message"]
    assert f"this model's maximum context length is {CONTEXT_LENGTH} tokens" in error["message"]


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"\xff\xfe", "malformed_message", None),
        (b"{", "malformed_message", None),
        (b"[]", "malformed_message", None),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_field", "temperature"),
        (b'{"prompt": "a", "x": NaN}', "malformed_message", None),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_field", "temperature"),
        (b'{"prompt": "\\ud800"}', "invalid_field", "prompt"),
        (b'{"prompt": "a", "n": 1, "prompt": "b"}', "invalid_field", "prompt"),
        (b'{"prompt": "a", "prompt": "a"}', "invalid_field", "prompt"),
        (b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "invalid_field", "logit_bias.5"),
        (b'{"prompt": "a", "x": [{}, {"y": 1, "y": 2}]}', "invalid_field", "x[1].y"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 2}, "x": 1}', "invalid_field", "x"),
        (b'{"prompt": "a", "\\ud800": 1, "\\ud800": 2}', "invalid_field", "\\ud800"),
    ],
)
async def test_bad_json_is_refused(data: bytes, code: str, param: str | None, quire: Harness) -> None:
    response = await quire.http.post("/v1/completions", content=data, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "text/json", "", None],
)
async def test_a_web_page_of_another_origin_cannot_post(content_type: str | None, quire: Harness) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await quire.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (415, "unsupported_media_type", "Content-Type")
    assert not quire.scheduler.all("submit")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON ;charset=UTF-8"])
async def test_json_may_have_a_charset(content_type: str, quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    headers = {"content-type": content_type}
    response = await quire.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "name",
    ["Idempotency-Key", "x-request-timeout", "last-event-id", "Authorization", "x-api-key", "api-key", "Content-Type"],
)
async def test_a_header_that_is_there_twice_is_refused(name: str, quire: Harness) -> None:
    headers = [(name, "1"), (name, "2"), *(JSON | {"idempotency-key": "one"}).items()]
    content = b'{"prompt": "a", "stream": true}'
    response = await quire.http.post("/v1/completions", content=content, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_field", name)
    assert not quire.scheduler.all("submit")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions/", {"prompt": "a"}), ("/v1/chat/completions/", {"messages": MESSAGES}), ("/v1/models/", None)],
)
async def test_a_slash_at_the_end_of_a_path_changes_nothing(
    path: str, body: dict[str, Any] | None, quire: Harness
) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    response = await quire.http.request("GET" if body is None else "POST", path, json=body)
    assert response.status_code == 200


@pytest.mark.parametrize("has_length", [True, False], ids=["with its length", "in chunks"])
async def test_a_body_that_is_too_large_leaves_the_next_alone(has_length: bool, quire: Harness) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 2**20

    content = b" " * (40 * 2**20) if has_length else chunks()
    response = await quire.http.post("/v1/completions", content=content, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "message_too_large")
    assert (await quire.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/audio/speech", 404, "not_found"),
        ("GET", "/v1/completions//", 404, "not_found"),
        ("GET", "/v1/completions/", 405, "method_not_allowed"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
        ("PATCH", "/health", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there_is_an_error_of_the_same_shape(
    method: str, path: str, status: int, code: str, quire: Harness
) -> None:
    response = await quire.http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("allow" in response.headers) == (status == 405)


def calls_of(path: str, code: int) -> str:
    return f'quire_gateway_requests_total{{code="{code}",method="{path}",model="tiny",protocol="http"}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize(
    ("reason", "code"),
    [(scheduler_v1.FAILURE_REASON_INTERNAL, 500), (scheduler_v1.FAILURE_REASON_UNAVAILABLE, 503)],
)
async def test_a_stream_that_fails_is_counted_with_the_status_of_its_failure(
    path: str, body: dict[str, Any], reason: scheduler_v1.FailureReason, code: int, quire: Harness
) -> None:
    def fail_after_the_first_token(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, encoded("hello"), 0)
        session.fail(submit.key, reason)

    quire.scheduler.script = fail_after_the_first_token
    counted = [await quire.metric(calls_of(path, each)) for each in (200, code)]
    response = await quire.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert [await quire.metric(calls_of(path, each)) for each in (200, code)] == [counted[0], counted[1] + 1]


async def test_a_stream_whose_client_leaves_is_counted_as_such(quire: Harness) -> None:
    def begin(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, encoded("hello"), 0)

    quire.scheduler.script = begin
    path = "/v1/completions"
    counted = [await quire.metric(calls_of(path, code)) for code in (200, 499)]
    async with quire.http.stream("POST", path, json={"prompt": "a", "stream": True}) as response:
        assert response.status_code == 200
        await anext(response.aiter_bytes())
    await quire.scheduler.next("cancel")
    assert [await quire.metric(calls_of(path, code)) for code in (200, 499)] == [counted[0], counted[1] + 1]


async def test_no_value_of_a_client_becomes_a_label(quire: Harness) -> None:
    labels = '{code="404",method="/v1/models/{model:path}",model="",protocol="http"}'
    num_before = await quire.metric(f"quire_gateway_requests_total{labels}")
    await quire.http.request("EVIL", "/evil")
    await quire.http.get("/v1/models/evil")
    await quire.http.post("/v1/completions", json={"prompt": "a", "model": "evil"})
    text = (await quire.http.get("/metrics")).text
    assert "evil" not in text.lower()
    assert await quire.metric(f"quire_gateway_requests_total{labels}") == num_before + 1


async def test_a_request_that_is_no_http_ends_only_its_connection(quire: Harness) -> None:
    with socket.create_connection(("127.0.0.1", quire.gateway.http_port)) as raw:
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(raw, b"\x00\x01 garbage\r\n\r\n")
        async with asyncio.timeout(60):
            assert b"400" in await loop.sock_recv(raw, 1_000)
    assert (await quire.http.get("/live")).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KNOWN = [
    "prompt", "messages", "stop", "n", "best_of", "use_beam_search", "early_stopping", "max_tokens", "logit_bias",
    "stream", "temperature", "seed", "top_k",
]  # fmt: skip
bodies = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), json_values, max_size=4)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    data=st.binary(max_size=40) | bodies.map(lambda body: json.dumps(body | {"prompt": "a"}).encode()),
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
async def test_any_body_is_answered_or_refused_as_documented(data: bytes, path: str, quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello world"), stop_token_id=EOS)
    response = await quire.http.post(path, content=data, headers=JSON)
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        code = response.json()["error"]["code"]
        assert code in ("malformed_message", "invalid_field", "context_length_exceeded", "feature_unsupported")
