"""Items of a conversation become messages of a chat, and come back as items."""

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway_svc.chats import ChatMessage, ToolCall
from gateway_svc.http_api.responses.conversation import Truncations, chat_messages, input_items, without_logprobs
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.responses.stored_response import StoredResponse
from svc_common.errors import QuireError, Reason

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}]}


def items_of(given: Any) -> list[dict[str, Any]]:
    return input_items(ResponsesBody.of({"input": given}).input, "resp_1")


def messages_of(given: Any, history: Any = (), instructions: str | None = None) -> list[ChatMessage]:
    old = items_of(list(history)) if history else []
    return chat_messages(instructions, old, items_of(given), is_text=isinstance(given, str))


def test_a_text_is_a_message_of_the_user() -> None:
    system, user = ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")
    assert messages_of("Hi", instructions="Be brief.") == [system, user]
    [item] = items_of("Hi")
    assert (item["type"], item["role"], item["content"]) == ("message", "user", [{"type": "input_text", "text": "Hi"}])


def test_items_of_one_turn_are_one_message() -> None:
    second = {**CALL, "call_id": "d"}
    call, other = ToolCall("f", "{}", "c"), ToolCall("f", "{}", "d")
    assert messages_of([USER, REASONING, ANSWER, CALL, second, OUTPUT, ANSWER]) == [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "Hello", (call, other), reasoning="Hm."),
        ChatMessage("tool", "sunny", (), "c", "f"),
        ChatMessage("assistant", "Hello"),
    ]


def test_a_call_alone_has_no_text() -> None:
    assert messages_of([USER, CALL])[-1] == ChatMessage("assistant", None, (ToolCall("f", "{}", "c"),))


def test_a_custom_tool_takes_a_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": 'a"'}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]}
    assert messages_of([USER, call, output])[1:] == [
        ChatMessage("assistant", None, (ToolCall("run", id="c", input='a"'),)),
        ChatMessage("tool", "done", (), "c", "run"),
    ]
    assert messages_of([output], history=[call])[-1] == ChatMessage("tool", "done", (), "c", "run")
    assert [(item["type"], item["id"].partition("_")[0]) for item in items_of([call, output])] == [
        ("custom_tool_call", "ctc"),
        ("custom_tool_call_output", "ctco"),
    ]


def test_two_answers_in_a_row_are_two_messages() -> None:
    assert [one.content for one in messages_of([ANSWER, ANSWER])] == ["Hello", "Hello"]
    assert [one.reasoning for one in messages_of([REASONING, ANSWER, REASONING, ANSWER])] == ["Hm.", "Hm."]


def test_earlier_items_come_first_and_calls_of_them_may_be_answered() -> None:
    messages = messages_of([OUTPUT], [USER, CALL])
    assert [one.role for one in messages] == ["user", "assistant", "tool"]
    assert [one.path for one in messages] == ["previous_response_id", "previous_response_id", "input[0]"]


def test_reasoning_without_text_is_left_out() -> None:
    empty: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None, "status": "completed"}
    assert [one.role for one in messages_of([USER, ANSWER, empty, USER])] == ["user", "assistant", "user"]


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of([{"role": "developer", "content": parts}]) == [ChatMessage("developer", "a\nb")]


def test_items_keep_the_ids_that_they_have() -> None:
    items = items_of([{**USER, "id": "msg_mine"}, USER, CALL, OUTPUT, REASONING])
    assert items[0]["id"] == "msg_mine"
    assert [item["id"].split("_")[0] for item in items[1:]] == ["msg", "fc", "fco", "rs"]
    assert items == items_of([{**USER, "id": "msg_mine"}, USER, CALL, OUTPUT, REASONING])
    assert items_of(items) == items


def truncations(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    choices = Truncations.of(messages)
    return [choices.chat(index) for index in range(len(choices))]


def test_truncations_keep_the_system_and_no_result_without_its_call() -> None:
    system, user, answer, call, result = (
        ChatMessage(role) for role in ("system", "user", "assistant", "assistant", "tool")
    )
    messages = [system, user, answer, call, result, user]
    assert truncations(messages) == [
        [system, answer, call, result, user],
        [system, call, result, user],
        [system, user],
    ]
    assert truncations([user]) == [[user]]
    assert truncations([system]) == [[system]]


def test_truncations_of_many_messages_take_the_memory_of_one_chat() -> None:
    messages = [ChatMessage("user")] * 4_000
    tracemalloc.start()
    try:
        choices = Truncations.of(messages)
        assert [len(choices.chat(index)) for index in (0, 2_000, 3_998)] == [3_999, 1_999, 1]
        assert tracemalloc.get_traced_memory()[1] < 2**21  # all of them together have 64 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("given", "field", "reason"),
    [
        ([OUTPUT], "input[0].call_id", Reason.INVALID_FIELD),
        ([{"type": "reasoning", "encrypted_content": "x"}], "input[0].encrypted_content", Reason.FEATURE_UNSUPPORTED),
        ([{"type": "web_search_call"}], "input[0].type", Reason.FEATURE_UNSUPPORTED),
        ([{"role": "robot", "content": ""}], "input[0].role", Reason.INVALID_FIELD),
        ([{"role": "user"}], "input[0].content", Reason.INVALID_FIELD),
        ([USER, 3], "input[1]", Reason.INVALID_FIELD),
        (3, "input", Reason.INVALID_FIELD),
    ],
)
def test_what_is_wrong_is_named(given: Any, field: str, reason: Reason) -> None:
    with pytest.raises(QuireError) as error:
        messages_of(given)
    assert (error.value.field, error.value.reason) == (field, reason)


def test_what_is_stored_comes_back() -> None:
    stored = StoredResponse({"id": "resp_1", "background": True}, items_of([USER]), items_of("你好"), has_logprobs=True)
    assert StoredResponse.from_bytes(stored.to_bytes()) == stored


def test_what_an_earlier_release_stored_shows_reasoning() -> None:
    stored = StoredResponse({"id": "resp_1", "background": True}, hides_reasoning=True)
    values = json.loads(stored.to_bytes())
    del values["hides_reasoning"]
    assert StoredResponse.from_bytes(json.dumps(values).encode()) == replace(stored, hides_reasoning=False)


@pytest.mark.parametrize("data", [b"", b"items", b"[]", b"{}", b'{"version":2}', b'{"version":1}'])
def test_attachments_of_other_requests_are_not_responses(data: bytes) -> None:
    assert StoredResponse.from_bytes(data) is None


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(QuireError) as error:
        StoredResponse({"id": "\ud800"}).to_bytes()
    assert error.value.reason is Reason.MALFORMED_MESSAGE


def test_each_item_of_a_list_has_an_id_of_its_own() -> None:
    old = items_of([{**USER, "id": "a"}])
    given: Any = ResponsesBody.of({"input": [{**USER, "id": "a"}, {**USER, "id": "b"}, {**CALL, "id": "b"}]}).input
    items = input_items(given, "resp_1", old)
    assert items[1]["id"] == "b"
    assert len({item["id"] for item in [*old, *items]}) == 4
    assert input_items(given, "resp_1", old) == items
    with pytest.raises(QuireError) as error:
        items_of([{**USER, "id": "a" * 257}])
    assert error.value.field == "input[0].id"


def test_items_of_an_earlier_output_have_no_log_probabilities() -> None:
    part = {"type": "output_text", "text": "Hello", "annotations": []}
    message = {"type": "message", "content": [{**part, "logprobs": [{"token": "Hello"}]}]}
    assert without_logprobs([CALL, message]) == [CALL, {"type": "message", "content": [{**part, "logprobs": []}]}]
