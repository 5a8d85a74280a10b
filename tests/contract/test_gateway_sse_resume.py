"""Resumed server-sent events: after any event, with the same body and name."""

import json
from typing import Any

import pytest

from gateway_harness import Harness, encoded
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import ScriptedSession, cut_end, length_end, stop_end
from tiny_model import EOS

NAMED = {"idempotency-key": "mine"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
CONTINUED = {
    "messages": [*CHAT["messages"], {"role": "assistant", "content": "well"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
SEQUENCES = [
    (encoded("hello 😀 wor"), length_end()),
    ([*encoded("he"), EOS], stop_end(EOS)),
    (encoded("lo 😀")[:-1], length_end()),  # ends in the middle of a character
]


class Record:
    """A request that is submitted once, and replayed to later submissions."""

    def __init__(self) -> None:
        self._submits: dict[str, scheduler_v1.Submit] = {}

    def play(self, session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        first = self._submits.setdefault(submit.key, submit)
        if first is submit:
            session.accept(submit.key)
            for tokens in self._tokens(submit):
                for offset, token_id in enumerate(tokens.token_ids):
                    is_last = offset == len(tokens.token_ids) - 1
                    end = tokens.end if is_last else None
                    logprobs = tokens.logprobs[offset : offset + 1]
                    session.tokens(submit.key, [token_id], offset, tokens.index, end=end, logprobs=logprobs)
        elif first.body_digest == submit.body_digest:
            session.attached(first, *self._tokens(submit))
        else:
            session.fail(submit.key, scheduler_v1.FAILURE_REASON_KEY_IN_USE)

    def _tokens(self, submit: scheduler_v1.Submit) -> list[scheduler_v1.Tokens]:
        sequences = []
        for index in range(submit.n):
            token_ids, end = SEQUENCES[index % len(SEQUENCES)]
            if submit.has_stop_strings and index == 0:
                end = cut_end()
            asked = submit.sampling.HasField("logprobs")
            logprobs = [worker_v1.TokenLogprobs(logprob=-0.5 - place) for place in range(len(token_ids) * asked)]
            sequences.append(scheduler_v1.Tokens(index=index, token_ids=token_ids, logprobs=logprobs, end=end))
        return sequences


async def streamed(quire: Harness, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """The events of a stream, each with all its lines."""
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await quire.http.post(path, json=body | {"stream": True}, headers=asked)
    assert response.status_code == 200, response.text
    return [event for event in response.text.split("\n\n") if event]


def id_of(event: str) -> str:
    return event.split("\n")[0].removeprefix("id: ")


def data_of(event: str) -> Any:
    data = event.split("data: ")[1]
    return data if data == "[DONE]" else json.loads(data)


def flattened(events: list[str]) -> list[tuple[int, str, Any]]:
    """A stream as a client reads it: the text and the other fields of each choice, in order, then the last event."""
    received: list[tuple[int, str, Any]] = []
    for event in events:
        data = data_of(event)
        if data == "[DONE]" or not data["choices"]:
            received.append((-1, "last", data if data == "[DONE]" else data["usage"]))
            continue
        (choice,) = data["choices"]
        delta = choice.get("delta", choice)
        if "role" in delta:
            received.append((choice["index"], "role", delta["role"]))
        received += [(choice["index"], "char", char) for char in delta.get("content", choice.get("text"))]
        received += [(choice["index"], "token", token) for token in choice.get("token_ids", ())]
        received += [(choice["index"], "prompt", ids) for ids in (choice.get("prompt_token_ids"),) if ids]
        logprobs = choice["logprobs"] or {}
        received += [(choice["index"], "logprob", one) for one in logprobs.get("content", ())]
        columns = [logprobs.get(name, ()) for name in ("tokens", "token_logprobs", "text_offset")]
        received += [(choice["index"], "logprob", one) for one in zip(*columns, strict=True)]
        if choice["finish_reason"]:
            received.append((choice["index"], "finish", (choice["finish_reason"], choice["stop_reason"])))
    # Choices may interleave in any order, and events divide their parts differently.
    return sorted(received, key=lambda one: one[:2])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT | {"n": 3, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "seed": 3}),
        ("/v1/completions", {"prompt": "a", "n": 2, "stop": [" wor"], "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "a", "n": 2, "stop": [" wor"], "logprobs": 0, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "a", "n": 2, "echo": True, "max_tokens": 0}),
        ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "stop": [" wor"]}),
        ("/v1/chat/completions", CONTINUED | {"n": 3, "echo": True}),
    ],
)
async def test_a_stream_resumes_after_any_event(path: str, body: dict[str, Any], quire: Harness) -> None:
    quire.scheduler.script = Record().play
    whole = await streamed(quire, path, body, idempotency_key="mine")
    assert len({id_of(event) for event in whole}) == len(whole)
    for place, event in enumerate(whole):
        rest = await streamed(quire, path, body, idempotency_key="mine", last_event_id=id_of(event))
        assert sorted(flattened(whole[: place + 1]) + flattened(rest), key=lambda one: one[:2]) == flattened(whole)
        seen = {id_of(one) for one in whole[: place + 1]}
        assert not seen & {id_of(one) for one in rest}
        if rest:
            assert id_of(rest[-1]) == id_of(whole[-1])


async def test_events_of_a_request_without_a_name_have_no_id(quire: Harness) -> None:
    quire.scheduler.script = Record().play
    events = await streamed(quire, "/v1/completions", {"prompt": "a"})
    assert all(event.startswith("data: ") for event in events)


async def test_a_stream_of_very_many_choices_has_no_ids(quire: Harness) -> None:
    """Each id would have a position for each choice: their bytes would grow with the square of the choices."""
    quire.scheduler.script = Record().play
    most = await streamed(quire, "/v1/completions", {"prompt": ["a"] * 2, "n": 64}, idempotency_key="most")
    assert all(event.startswith("id: ") for event in most)
    body = {"prompt": ["a"] * 3, "n": 64}
    more = await streamed(quire, "/v1/completions", body, idempotency_key="mine")
    assert all(event.startswith("data: ") for event in more)
    again = await streamed(quire, "/v1/completions", body, idempotency_key="mine")
    assert flattened(again) == flattened(more)
    headers = NAMED | {"last-event-id": id_of(most[0])}
    response = await quire.http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_field", "last-event-id")
    assert error["message"] == "last-event-id: continues a stream of at most 128 choices"


async def test_the_same_request_is_given_again_from_its_beginning(quire: Harness) -> None:
    quire.scheduler.script = Record().play
    first = await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    again = await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    assert flattened(again) == flattened(first)
    whole = (await quire.http.post("/v1/completions", json={"prompt": "a"}, headers=NAMED)).json()
    assert whole["choices"][0]["text"] == "hello 😀 wor"
    seeds = [data_of(events[-2])["choices"][0]["seed"] for events in (first, again)]
    assert seeds == [whole["choices"][0]["seed"]] * 2


async def test_another_body_is_refused(quire: Harness) -> None:
    quire.scheduler.script = Record().play
    await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    body = {"prompt": "b", "stream": True}
    response = await quire.http.post("/v1/completions", json=body, headers=NAMED | {"last-event-id": "1"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (409, "idempotency_key_reused", "Idempotency-Key")
    assert error["message"] == "Idempotency-Key: is the name of another request"


@pytest.mark.parametrize(
    ("last_event_id", "code"),
    [
        ("", "invalid_field"),
        ("-1", "invalid_field"),
        ("1x", "invalid_field"),
        ("1-1", "invalid_field"),
        ("9" * 10, "invalid_field"),
        ("1-done-done", "invalid_field"),
        ("999", "resume_offset_invalid"),
        ("1e", "resume_offset_invalid"),
    ],
)
async def test_a_wrong_cursor_is_named(last_event_id: str, code: str, quire: Harness) -> None:
    quire.scheduler.script = Record().play
    await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    headers = NAMED | {"last-event-id": last_event_id}
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, "last-event-id")


@pytest.mark.parametrize(("stream", "headers"), [(True, {}), (False, NAMED)])
async def test_only_a_stream_with_a_name_is_gone_on_with(stream: bool, headers: dict[str, str], quire: Harness) -> None:
    body = {"prompt": "a", "stream": stream}
    response = await quire.http.post("/v1/completions", json=body, headers=headers | {"last-event-id": "1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last-event-id")
    assert not quire.scheduler.all("submit")


async def test_what_is_gone_is_not_begun_anew(quire: Harness) -> None:
    unknown = scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
    quire.scheduler.script = lambda session, submit: session.fail(submit.key, unknown)
    body = {"prompt": "a", "stream": True}
    for _ in range(2):
        response = await quire.http.post("/v1/completions", json=body, headers=NAMED | {"last-event-id": "1"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_unknown")
        assert (await quire.scheduler.next("submit")).is_resumption
    assert not quire.scheduler.all("cancel")


async def test_only_what_its_client_has_a_part_of_is_a_resumption(quire: Harness) -> None:
    quire.scheduler.script = Record().play
    await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    await streamed(quire, "/v1/completions", {"prompt": "a"}, idempotency_key="mine")
    assert [submit.is_resumption for submit in quire.scheduler.all("submit")] == [False, False]


async def test_a_call_that_fails_cancels_what_it_submitted_and_not_what_it_joined(quire: Harness) -> None:
    def answer(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        match len(quire.scheduler.all("submit")):
            case 1:
                there = scheduler_v1.Submit(key=submit.key, n=1, submission_id="there", render_options={"n": 1})
                session.attached(there)
            case 2:
                session.accept(submit.key)
            case 3:
                session.fail(submit.key, scheduler_v1.FAILURE_REASON_KEY_IN_USE)

    quire.scheduler.script = answer
    response = await quire.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}, headers=NAMED)
    assert response.status_code == 409
    joined, own, _ = quire.scheduler.all("submit")
    assert (await quire.scheduler.next("detach")).key == joined.key
    assert (await quire.scheduler.next("cancel")).submission_id == own.submission_id
    assert len(quire.scheduler.all("cancel")) == 1
