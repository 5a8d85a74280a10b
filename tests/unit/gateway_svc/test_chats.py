"""Chats of the public contract: tools, the choice among them, and calls. The rest is in `openai/test_chat_fields`."""

from typing import Any

import pytest

from gateway_svc import chats
from gateway_svc.chats import ChatPrompt, ClientTool, CustomInput, ToolCall, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason

OF_TOMORROW = b"\xf8\x06\x01"  # field 111


def read(**fields: Any) -> ChatPrompt:
    return ChatPrompt.from_proto(api.Chat(**fields), "chat")


def refused(chat: api.Chat) -> tuple[Reason, str | None]:
    with pytest.raises(QuireError) as error:
        ChatPrompt.from_proto(chat, "chat")
    return error.value.reason, error.value.field


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        ({}, CustomInput()),
        ({"grammar": 'start: "a"'}, CustomInput(UnvalidatedConstraint(Field.GRAMMAR, 'start: "a"'))),
        ({"regex": "a+"}, CustomInput(UnvalidatedConstraint(Field.REGEX, "a+"))),
        ({"regex": ""}, CustomInput(UnvalidatedConstraint(Field.REGEX, ""))),
    ],
)
def test_a_custom_tool_takes_a_text(custom: dict[str, str], expected: CustomInput) -> None:
    (tool,) = read(tools=[{"name": "run", "description": "d", "custom": custom}]).tools
    assert tool == ClientTool("run", "d", custom=expected)
    assert tool.path == "chat.tools[0]"


def test_a_tool_without_it_is_a_function() -> None:
    assert read(tools=[{"name": "f"}]).tools == (ClientTool("f"),)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (api.TOOL_MODE_UNSPECIFIED, ToolMode.AUTO),
        (api.TOOL_MODE_AUTO, ToolMode.AUTO),
        (api.TOOL_MODE_REQUIRED, ToolMode.REQUIRED),
    ],
)
def test_some_of_the_tools_are_allowed(mode: api.ToolMode, expected: ToolMode) -> None:
    choice = read(allowed_tools={"mode": mode, "names": ["f", "g"]}).tool_choice
    assert choice == ToolChoice(expected, allowed=("f", "g"))


@pytest.mark.parametrize(
    ("allowed", "field"),
    [
        ({}, "names"),
        ({"mode": api.TOOL_MODE_REQUIRED}, "names"),
        ({"mode": api.TOOL_MODE_NONE, "names": ["f"]}, "mode"),
        ({"mode": 4, "names": ["f"]}, "mode"),
    ],
)
def test_a_choice_that_allows_nothing_is_refused(allowed: Any, field: str) -> None:
    assert refused(api.Chat(allowed_tools=allowed)) == (Reason.INVALID_FIELD, f"chat.allowed_tools.{field}")


def test_a_call_has_arguments_or_a_text() -> None:
    calls = [{"id": "c", "name": "f", "arguments": "{}"}, {"name": "run", "input": ""}]
    message = read(messages=[{"role": "assistant", "tool_calls": calls}]).messages[0]
    assert message.tool_calls == (ToolCall("f", "{}", "c"), ToolCall("run", input=""))
    assert message.tool_calls[1].path == "chat.messages[0].tool_calls[1]"


def test_too_many_tools_and_calls_are_refused_before_they_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_tool", "_tool_call"):
        monkeypatch.setattr(chats, name, None)
    call, tool = api.ToolCall(name="f"), api.Tool(name="f")
    answer = api.ChatMessage(role="assistant", tool_calls=[call] * 129)
    assert refused(api.Chat(tools=[tool] * 129)) == (Reason.INVALID_FIELD, "chat.tools")
    assert refused(api.Chat(messages=[answer])) == (Reason.INVALID_FIELD, "chat.messages[0].tool_calls")


def test_fields_of_a_later_contract_are_refused_by_their_number() -> None:
    custom, call = api.CustomInput.FromString(OF_TOMORROW), api.ToolCall.FromString(OF_TOMORROW)
    later = {
        "tools[0].custom.111": api.Chat(tools=[api.Tool(name="a", custom=custom)]),
        "messages[0].tool_calls[0].111": api.Chat(messages=[api.ChatMessage(tool_calls=[call])]),
        "allowed_tools.111": api.Chat(allowed_tools=api.AllowedTools.FromString(OF_TOMORROW)),
    }
    for field, chat in later.items():
        assert refused(chat) == (Reason.FEATURE_UNSUPPORTED, f"chat.{field}")
