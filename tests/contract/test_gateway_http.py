"""The OpenAI-style API over the wire, with a scripted scheduler; also with OpenAI's client."""

import asyncio
from typing import Any

import openai
import pytest

from gateway_harness import Harness, encoded
from official_client import official_client
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with
from sse import DONE, events_of
from tiny_model import CONTEXT_LENGTH, EOS

HELLO = encoded("hello world")
MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_chat_completion(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS, cached_tokens=2)
    response = await quire.http.post("/v1/chat/completions", json={"messages": MESSAGES, "model": "tiny"})
    assert response.status_code == 200
    body = response.json()
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert body["choices"][0]["message"]["content"] == "hello world"
    assert body["choices"][0]["finish_reason"] == "stop"
    num_prompt = len(encoded("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_an_answer_may_begin_with_the_message_that_it_continues(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    begun = {"role": "assistant", "content": [{"type": "text", "text": "I say: "}]}
    body = {
        "messages": [*MESSAGES, begun],
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    whole = (await quire.http.post("/v1/chat/completions", json=body)).json()
    assert whole["choices"][0]["message"]["content"] == "I say: hello world"
    *events, _ = events_of((await quire.http.post("/v1/chat/completions", json={**body, "stream": True})).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "I say: "}
    assert "".join(delta["content"] for delta in deltas) == "I say: hello world"
    named = {"Idempotency-Key": "mine"}
    response = await quire.http.post("/v1/chat/completions", json={**body, "stream": True}, headers=named)
    first = response.text.split("\n\n")[0]
    assert (first.split("\n")[0], "I say: " in first) == ("id: 0r", True)
    resumed = await quire.http.post(
        "/v1/chat/completions", json={**body, "stream": True}, headers={**named, "Last-Event-ID": "0r"}
    )
    assert "I say" not in resumed.text
    other = (await quire.http.post("/v1/chat/completions", json={"messages": MESSAGES, "echo": True})).json()
    assert other["choices"][0]["message"]["content"] == "hello world"  # the last message is the user's
    both = (await quire.http.post("/v1/chat/completions", json={**body, "n": 2})).json()
    assert [choice["message"]["content"] for choice in both["choices"]] == ["I say: hello world"] * 2


async def test_a_streamed_chat_completion(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    response = await quire.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, done = events_of(response.text)
    assert done == DONE
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "hello world"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
    assert {event["id"] for event in events} == {f"chatcmpl-{response.headers['x-request-id']}"}


async def test_usage_is_the_last_event_if_requested(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    *events, last, done = events_of((await quire.http.post("/v1/completions", json=body)).text)
    assert done == DONE
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)
    assert all(event["choices"] for event in events)


async def test_several_prompts_are_numbered_prompt_by_prompt(quire: Harness) -> None:
    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        answer_with(list(submit.prompt_token_ids), EOS_ONLY)(session, submit)

    quire.scheduler.script = script
    body = {"prompt": ["he", "ll", encoded("or")], "n": 2, "max_tokens": 8}
    whole = (await quire.http.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["he", "", "ll", "", "or", ""]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 6
    events = events_of((await quire.http.post("/v1/completions", json=body | {"stream": True})).text)[:-1]
    texts = dict.fromkeys(range(6), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == ["he", "", "ll", "", "or", ""]


EOS_ONLY = [EOS]


async def test_prompts_of_one_call_are_requests_of_their_own(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    for body in ({"prompt": ["a", "a"], "seed": 5}, {"prompt": ["a", "a"]}):
        await quire.http.post("/v1/completions", json=body)
    given_first, given_second, drawn_first, drawn_second = quire.scheduler.all("submit")
    assert len({submit.key for submit in quire.scheduler.all("submit")}) == 4
    assert given_first.sampling.seed == given_second.sampling.seed == 5
    assert drawn_first.sampling.seed != drawn_second.sampling.seed


async def test_the_seed_of_a_choice_comes_back(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    body = (await quire.http.post("/v1/completions", json={"prompt": "a"})).json()
    assert body["choices"][0]["seed"] == quire.scheduler.all("submit")[0].sampling.seed


async def test_the_official_client_streams_and_counts(quire: Harness) -> None:
    async with official_client(quire) as client:
        quire.scheduler.script = answer_with(encoded("hello 😀 world"), stop_token_id=EOS)
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": False, "min_tokens": 1, "top_k": 5},
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == "hello 😀 world"
        assert usage is not None
        assert usage.completion_tokens == len(encoded("hello 😀 world")) + 1


async def test_the_official_client_reads_logprobs(quire: Harness) -> None:
    async with official_client(quire) as client:
        quire.scheduler.script = answer_with(HELLO)
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=2,
        )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert [one.token for one in logprobs.content or ()] == ["hello", " world"]
        assert [len(one.top_logprobs) for one in logprobs.content or ()] == [2, 2]
        completion = await client.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=2)
        legacy = completion.choices[0].logprobs
        assert legacy is not None
        assert (legacy.tokens, legacy.token_logprobs, legacy.text_offset) == (["hello", " world"], [-0.5, -0.5], [0, 5])


async def test_the_official_client_lists_models(quire: Harness) -> None:
    async with official_client(quire) as client:
        models = [model async for model in await client.models.list()]
        assert [model.id for model in models] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "quire"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_the_official_client_knows_our_errors(quire: Harness) -> None:
    async with official_client(quire) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(model="tiny", prompt="a", temperature=3)
        assert (error.value.param, error.value.code, error.value.type) == (
            "temperature",
            "invalid_field",
            "invalid_request_error",
        )
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt", prompt="a")
        assert missing.value.code == "model_not_found"


async def test_a_failure_in_mid_stream_is_an_event_and_no_done(quire: Harness) -> None:
    async with official_client(quire) as client:

        def script(session: Any, submit: scheduler_v1.Submit) -> None:
            session.accept(submit.key)
            session.tokens(submit.key, HELLO[:1], 0)
            session.fail(submit.key, scheduler_v1.FAILURE_REASON_INTERNAL, "secret")

        quire.scheduler.script = script
        response = await quire.http.post("/v1/completions", json={"prompt": "a", "stream": True})
        *events, last = events_of(response.text)
        assert "".join(event["choices"][0]["text"] for event in events) == "hello"
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal")
        assert "secret" not in response.text
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "kind"), [(None, "cancel"), ("mine", "detach")])
async def test_a_client_that_leaves_is_noticed(name: str | None, kind: str, stream: bool, quire: Harness) -> None:
    headers = {"idempotency-key": name} if name else {}
    body = {"prompt": "a", "stream": stream}
    asking = asyncio.create_task(quire.http.post("/v1/completions", json=body, headers=headers))
    submit = await quire.scheduler.next("submit")
    assert submit.detachable == (name is not None)
    quire.scheduler.session.accept(submit.key)
    asking.cancel()
    assert (await quire.scheduler.next(kind)).key == submit.key


@pytest.mark.parametrize(
    ("headers", "reason", "kind"),
    [
        ({}, scheduler_v1.FAILURE_REASON_UNAVAILABLE, "cancel"),
        ({"idempotency-key": "mine"}, scheduler_v1.FAILURE_REASON_CANCELLED, "cancel"),
        ({"idempotency-key": "mine"}, scheduler_v1.FAILURE_REASON_UNAVAILABLE, "detach"),
    ],
    ids=["unnamed", "named", "named and to be tried again"],
)
async def test_no_prompt_runs_on_for_nobody_when_one_fails(
    quire: Harness, headers: dict[str, str], reason: scheduler_v1.FailureReason, kind: str
) -> None:
    asking = asyncio.create_task(quire.http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers=headers))
    first, second = [await quire.scheduler.next("submit") for _ in range(2)]
    for submit in (first, second):
        quire.scheduler.session.accept(submit.key)
    quire.scheduler.session.fail(first.key, reason)
    assert (await asking).status_code in (499, 503)
    assert (await quire.scheduler.next(kind)).key == second.key


async def test_the_idempotency_key_names_the_request(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    response = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers={"idempotency-key": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"
    bad = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers={"idempotency-key": "not mine"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_clients_own_id_is_repeated_and_names_nothing(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO)
    for _ in range(2):
        response = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "theirs"})
        assert response.headers["x-request-id"] == "theirs"
        assert response.json()["id"] == f"cmpl-{response.headers['x-quire-request-id']}" != "cmpl-theirs"
    response = await quire.http.get("/health", headers={"x-request-id": "theirs"})
    assert response.headers["x-request-id"] == "theirs"
    for other in ("a b", "", "a" * 129, "\u00e9"):
        response = await quire.http.get("/health", headers=[(b"x-request-id", other.encode("latin-1"))])
        assert len(response.headers["x-request-id"]) == 32
        assert "x-quire-request-id" not in response.headers


async def test_the_time_that_a_client_gives_is_carried_and_kept(quire: Harness) -> None:
    headers = {"x-request-timeout": "2"}
    response = await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.status_code == 504
    (submit,) = quire.scheduler.all("submit")
    assert 0 < submit.time_left.ToTimedelta().total_seconds() <= 2


async def test_a_model_is_found_by_its_name(quire: Harness) -> None:
    models = (await quire.http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert models["data"] == [(await quire.http.get("/v1/models/tiny")).json()]
    assert models["data"][0]["max_model_len"] == CONTEXT_LENGTH
    assert (models["first_id"], models["last_id"], models["has_more"]) == ("tiny", "tiny", False)


async def test_health_is_readiness_and_live_is_life(quire: Harness) -> None:
    assert (await quire.http.get("/health")).status_code == 200
    quire.scheduler.session.status(None)
    async with asyncio.timeout(60):
        while (await quire.http.get("/health")).status_code != 503:
            await asyncio.sleep(0.01)
    assert (await quire.http.get("/live")).status_code == 200
    refusal = await quire.http.post("/v1/completions", json={"prompt": "a"})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "model_not_ready")
    assert int(refusal.headers["retry-after"]) >= 1


async def test_version_and_metrics_are_there(quire: Harness) -> None:
    assert (await quire.http.get("/version")).json()["version"]
    response = await quire.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'quire_gateway_requests_in_flight{model="tiny"} 0.0' in response.text


async def test_a_stream_that_waits_is_kept_alive(quire: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_svc.http_api.answer_sender.PING_SECONDS", 0.01)
    quire.scheduler.script = lambda session, submit: session.accept(submit.key)
    async with quire.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        submit = await quire.scheduler.next("submit")
        rows = response.aiter_lines()
        assert await anext(rows) == ": ping"
        quire.scheduler.session.tokens(submit.key, HELLO, 0)
        async with asyncio.timeout(60):
            async for row in rows:
                if "hello world" in row:
                    break


async def test_text_comes_before_the_whole_is_there(quire: Harness) -> None:
    def script(session: Any, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        session.tokens(submit.key, HELLO[:1], 0)

    quire.scheduler.script = script
    async with (
        asyncio.timeout(60),
        quire.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response,
    ):
        assert "hello" in await anext(response.aiter_text())


async def test_ignored_fields_are_named_in_the_answer_and_counted(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    fields = {"prompt": "a", "brand_new": {"x": 1}, "b\r\nc: d": 0, "nothing": None}
    for stream in (False, True):
        response = await quire.http.post("/v1/completions", json={**fields, "stream": stream})
        assert (response.status_code, response.headers["x-quire-ignored-fields"]) == (200, "brand_new, b??c??d")
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "user": "me"})
    assert "x-quire-ignored-fields" not in response.headers
    metrics = (await quire.http.get("/metrics")).text
    assert 'quire_gateway_ignored_fields_total{method="/v1/completions"} 4.0' in metrics


async def test_the_document_of_the_api_and_its_page_are_served(quire: Harness) -> None:
    document = (await quire.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/models/{model}", "/metrics", "/docs"} <= document["paths"].keys()
    for path in ("/openapi.json", "/docs", "/live", "/version", "/v1/models"):
        response = await quire.http.get(path)
        (kind,) = document["paths"][path]["get"]["responses"]["200"].get("content", {"application/json": {}})
        assert (response.status_code, response.headers["content-type"].partition(";")[0]) == (200, kind)
    assert "default-src 'none'" in (await quire.http.get("/docs")).headers["content-security-policy"]


async def test_token_ids_and_running_usage_of_a_stream(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HELLO, stop_token_id=EOS)
    body = {
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "service_tier": "auto",
    }
    response = await quire.http.post("/v1/chat/completions", json=body)
    role, *others, last, done = events_of(response.text)
    assert role["prompt_token_ids"] == encoded("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert [token for event in others for token in event["choices"][0]["token_ids"]] == [*HELLO, EOS]
    num_tokens = [event["usage"]["completion_tokens"] for event in (role, *others, last)]
    assert (num_tokens[0], num_tokens[-2:]) == (0, [3, 3])
    assert num_tokens == sorted(num_tokens)
    assert {event["service_tier"] for event in (role, *others, last)} == {"default"}
    assert {event["system_fingerprint"][:3] for event in (role, *others, last)} == {"fp_"}
    assert done == DONE
