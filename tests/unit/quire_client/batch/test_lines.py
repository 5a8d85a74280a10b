"""Lines of a batch: what is read, what is refused by name, and what is written."""

import json
from typing import Any

import pytest

from quire_client.batch.lines import BatchError, LineAnswer, read_line

CHAT = "/v1/chat/completions"
FIELDS: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def spelled(**changes: Any) -> bytes:
    """A line with other fields, and without those that are None."""
    return json.dumps({name: value for name, value in (FIELDS | changes).items() if value is not None}).encode()


def test_a_line_has_its_fields_and_the_body_is_sent_as_it_is() -> None:
    body = {"messages": [{"role": "user", "content": "é\n🙂"}], "seed": 2**62, "temperature": 0.1}

    line = read_line(spelled(body=body, extra=1), 7)

    assert (line.number, line.custom_id, line.url) == (7, "a", CHAT)
    assert json.loads(line.body) == body
    assert "é".encode() in line.body
    assert line.ignored_fields == ("extra",)
    assert line.is_nameable


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "is not JSON: Expecting property name"),
        (b"[]", "is not a JSON object"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"custom_id": ' + b"1" * 5000 + b"}", "has a number with too many digits"),
        (spelled(custom_id=None), "custom_id: must be given"),
        (spelled(custom_id=5), "custom_id: must be a string"),
        (spelled(custom_id=""), "custom_id: must be a string that is not empty"),
        (spelled(method=None), "method: must be given"),
        (spelled(method="GET"), 'method: must be "POST"'),
        (spelled(url=None), "url: must be given"),
        (spelled(url="https://api.openai.com/v1/completions"), "url: must be a path"),
        (spelled(body=None), "body: must be given"),
        (spelled(body="{}"), "body: must be a JSON object"),
        (spelled(body={"stream": True}), "body.stream: must be left out or false"),
        (spelled(url="/api/chat", body={}), "body.stream: must be false: /api/chat streams"),
        (spelled(url="/v1/responses", body={"background": True}), "body.background: must be left out or false"),
        (spelled().replace(b'"messages"', b'"n": 1, "n"'), "n: is there twice"),
        (spelled().replace(b"[]", b"NaN"), "NaN is no number"),
        (spelled().replace(b"[]", b"1e999"), "body: has a number that is not finite"),
    ],
)
def test_a_line_that_cannot_be_sent_is_refused_by_number_and_field(data: bytes, problem: str) -> None:
    with pytest.raises(BatchError) as raised:
        read_line(data, 7)
    assert str(raised.value).startswith(f"line 7: {problem}")


@pytest.mark.parametrize("body", [{"stream": False}, {"stream": None}, {}])
def test_a_body_may_turn_streaming_off(body: dict[str, Any]) -> None:
    assert json.loads(read_line(spelled(body=body), 1).body) == body


@pytest.mark.parametrize(
    ("url", "body", "is_nameable"),
    [
        (CHAT, {"store": False}, True),  # of chats it has no effect
        ("/v1/completions/", {}, True),
        ("/v1/chat/completions/batch", {"messages": []}, True),
        ("/v1/messages", {}, True),
        ("/api/chat", {"stream": False}, True),
        ("/v1/responses", {}, True),
        ("/v1/responses", {"store": True}, True),
        ("/v1/responses", {"store": False}, False),
        ("/invocations", {"messages": []}, True),
        ("/invocations", {"prompt": "x"}, True),
        ("/invocations", {"input": "x"}, False),
        ("/v1/embeddings", {}, False),
        ("/v1/embeddings/", {}, False),
        ("/v1/score", {}, False),
        ("/rerank", {}, False),
        ("/api/embed", {}, False),
        ("/tokenize", {}, False),
        ("/detokenize", {}, False),
        ("/v1/messages/count_tokens", {}, False),
    ],
)
def test_requests_that_the_server_does_not_name_have_no_name(url: str, body: dict[str, Any], is_nameable: bool) -> None:
    assert read_line(spelled(url=url, body=body), 1).is_nameable is is_nameable


def test_the_digest_depends_on_what_the_request_is_and_not_on_its_spelling() -> None:
    line = read_line(spelled(body={"a": 1, "b": 2}), 1)
    again = read_line(
        b'{"body": {"a":1,\t"b":2}, "method": "POST", "url": "%b", "custom_id": "\\u0061"}' % CHAT.encode(), 1
    )
    assert again.id == line.id
    others = [
        read_line(spelled(body={"a": 1, "b": 2}), 2),
        read_line(spelled(body={"a": 1, "b": 2}, custom_id="b"), 1),
        read_line(spelled(body={"a": 1, "b": 2}, url="/v1/completions"), 1),
        read_line(spelled(body={"b": 2, "a": 1}), 1),  # the order of a schema's properties is that of the answer
    ]
    assert len({line.id, *(other.id for other in others)}) == 5


def test_half_of_a_surrogate_pair_is_sent_as_an_escape() -> None:
    line = read_line(spelled(custom_id="\ud800", body={"prompt": "\ud800"}), 1)
    assert line.body == b'{"prompt":"\\ud800"}'
    assert json.loads(LineAnswer(200, None, b"{}").output_line(line))["custom_id"] == "\ud800"


def test_an_answer_is_one_line_as_openai_writes_it() -> None:
    line = read_line(spelled(custom_id='"é"'), 3)
    written = LineAnswer(200, "r-1", b'{\r\n  "text": "a\\nb"\n}\n').output_line(line)
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    assert json.loads(written) == {
        "id": line.id,
        "custom_id": '"é"',
        "response": {"status_code": 200, "request_id": "r-1", "body": {"text": "a\nb"}},
        "error": None,
    }


def test_a_refusal_is_a_line_with_its_status_and_the_servers_error() -> None:
    answer = LineAnswer(400, "r-1", b'{"error": {"message": "no"}}')
    assert answer.is_error
    written = json.loads(answer.output_line(read_line(spelled(), 1)))
    assert written["response"] == {"status_code": 400, "request_id": "r-1", "body": {"error": {"message": "no"}}}
    assert written["error"] is None


def test_a_response_without_json_is_an_error_with_its_text() -> None:
    answer = LineAnswer(431, None, None, "too large")
    assert answer.is_error
    written = json.loads(answer.output_line(read_line(spelled(), 1)))
    assert written["response"] == {"status_code": 431, "request_id": None, "body": None}
    assert written["error"] == {"code": "http_431", "message": "too large"}


def test_a_request_that_was_not_answered_in_time_has_no_response() -> None:
    answer = LineAnswer(None, None, None, "no answer")
    assert answer.is_error
    written = json.loads(answer.output_line(read_line(spelled(), 1)))
    assert written["response"] is None
    assert written["error"] == {"code": "request_timeout", "message": "no answer"}
