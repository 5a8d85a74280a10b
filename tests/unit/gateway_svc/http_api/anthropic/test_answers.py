"""Answers in Anthropic's format."""

import json
from typing import Any

import pytest

from gateway_svc.http_api.anthropic.answers import MessageBuilder
from gateway_svc.http_api.anthropic.errors import ANTHROPIC_ERRORS
from gateway_svc.http_api.errors import HttpError
from gateway_svc.output import Chunk, Finish, FinishReason, ToolCallDelta, Usage
from gateway_values import make_rendering, vocabulary_of
from svc_common.errors import QuireError, Reason
from tiny_model import tiny_tokenizer

RENDERING = make_rendering(vocabulary_of(tiny_tokenizer()))
USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=2)
USAGE_JSON = {
    "input_tokens": 7,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 2,
    "output_tokens": 4,
}
STOP = Finish(FinishReason.STOP, 2)
CHUNKS = [
    Chunk(0, 0, reasoning="Hm"),
    Chunk(0, 1, "I ", reasoning="."),
    Chunk(0, 2, "look\n."),
    Chunk(0, 3, tool_calls=[ToolCallDelta(0, "", "call_a", "f")]),
    Chunk(0, 4, tool_calls=[ToolCallDelta(0, '{"a"')]),
    Chunk(0, 5, tool_calls=[ToolCallDelta(0, ": 1}"), ToolCallDelta(1, "{}", "call_b", "g")]),
    Chunk(0, 6, finish=Finish(FinishReason.TOOL_CALLS, 2)),
]


def whole(*chunks: Chunk) -> Any:
    return MessageBuilder(RENDERING, lambda: USAGE).whole([(0, chunk) for chunk in chunks])


def events(*chunks: Chunk) -> list[Any]:
    """The data of a stream's events, each with its name as its type."""
    builder = MessageBuilder(RENDERING, lambda: USAGE)
    text = b"".join([*(builder.event(0, chunk) for chunk in chunks), builder.last_events()]).decode()
    read = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def test_a_whole_message() -> None:
    assert whole(*CHUNKS) == {
        "id": f"msg_{RENDERING.request_id}",
        "type": "message",
        "role": "assistant",
        "model": RENDERING.model,
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look\n."},
            {"type": "tool_use", "id": "call_a", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE_JSON,
    }


def test_a_streamed_message() -> None:
    first, *rest = events(*CHUNKS)
    empty: Any = {"content": [], "stop_reason": None, "stop_sequence": None}
    assert first == {"type": "message_start", "message": whole(*CHUNKS) | empty}

    def start(index: int, block: Any) -> Any:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def delta(index: int, **delta: str) -> Any:
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def stop(index: int) -> Any:
        return {"type": "content_block_stop", "index": index}

    assert rest == [
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, type="thinking_delta", thinking="Hm"),
        delta(0, type="thinking_delta", thinking="."),
        stop(0),
        start(1, {"type": "text", "text": ""}),
        delta(1, type="text_delta", text="I "),
        delta(1, type="text_delta", text="look\n."),
        stop(1),
        start(2, {"type": "tool_use", "id": "call_a", "name": "f", "input": {}}),
        delta(2, type="input_json_delta", partial_json='{"a"'),
        delta(2, type="input_json_delta", partial_json=": 1}"),
        stop(2),
        start(3, {"type": "tool_use", "id": "call_b", "name": "g", "input": {}}),
        delta(3, type="input_json_delta", partial_json="{}"),
        stop(3),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE_JSON,
        },
        {"type": "message_stop"},
    ]


def test_text_after_a_call_in_one_chunk_leaves_the_call_whole() -> None:
    chunks = [
        Chunk(0, 0, tool_calls=[ToolCallDelta(0, '{"a', "call_a", "f")]),
        Chunk(0, 1, "Done.", tool_calls=[ToolCallDelta(0, '": 1}'), ToolCallDelta(1, "{}", "call_b", "g")]),
    ]
    blocks: dict[int, Any] = {}
    for event in events(*chunks):
        match event["type"]:
            case "content_block_start":
                blocks[event["index"]] = event["content_block"], []
            case "content_block_delta":
                delta = event["delta"]
                blocks[event["index"]][1].append(delta.get("text", delta.get("partial_json")))
    assert [(block["type"], block.get("id"), "".join(parts)) for block, parts in blocks.values()] == [
        ("tool_use", "call_a", '{"a": 1}'),
        ("text", None, "Done."),
        ("tool_use", "call_b", "{}"),
    ]


def test_an_empty_answer_has_no_blocks() -> None:
    assert whole(Chunk(0, 0, finish=STOP))["content"] == []
    assert [event["type"] for event in events(Chunk(0, 0, finish=STOP))] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (STOP, "end_turn", None),
        (Finish(FinishReason.STOP), "end_turn", None),
        (Finish(FinishReason.STOP, "END"), "stop_sequence", "END"),
        (Finish(FinishReason.LENGTH), "max_tokens", None),
        (Finish(FinishReason.TOOL_CALLS), "tool_use", None),
    ],
)
def test_why_it_stopped(finish: Finish, reason: str, sequence: str | None) -> None:
    expected = {"stop_reason": reason, "stop_sequence": sequence}
    answer = whole(Chunk(0, 0, "a", finish=finish))
    assert {name: answer[name] for name in expected} == expected
    assert events(Chunk(0, 0, "a", finish=finish))[-2]["delta"] == expected


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.INVALID_FIELD, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, "authentication_error"),
        (Reason.PERMISSION_DENIED, "permission_error"),
        (Reason.MODEL_NOT_FOUND, "not_found_error"),
        (Reason.MESSAGE_TOO_LARGE, "request_too_large"),
        (Reason.TENANT_QUOTA_EXCEEDED, "rate_limit_error"),
        (Reason.INTERNAL, "api_error"),
        (Reason.CAPACITY_EXHAUSTED, "overloaded_error"),
        (Reason.DEADLINE_EXCEEDED, "timeout_error"),
    ],
)
def test_errors(reason: Reason, kind: str) -> None:
    error = HttpError.of(QuireError(reason, "is bad", field="top_p"))
    body = {"type": "error", "error": {"type": kind, "message": "top_p: is bad"}}
    assert ANTHROPIC_ERRORS.body(error) == body
    assert (
        ANTHROPIC_ERRORS.event(error)
        == b"event: error\ndata: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    )
