"""Chats with tools as chats of text alone."""

import json
from typing import Any

import pytest

from gateway_svc.message_formats.description import MessageFormat, Tool
from gateway_svc.message_formats.events import ToolArgumentsDelta, ToolCallBegin, ToolCallEnd, join_events
from gateway_svc.message_formats.formats import TOOL_FORMATS
from gateway_svc.message_formats.parser import MessageParser
from gateway_svc.message_formats.prompted import instructions, prompted_messages

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "é", "parameters": {}}}]
SMOLLM2 = TOOL_FORMATS["smollm2"]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tools_are_described_in_a_message_of_the_system() -> None:
    user = {"role": "user", "content": "Hi"}
    system, *rest = prompted_messages([user], TOOLS, SMOLLM2)
    assert system == {"role": "system", "content": instructions(TOOLS, SMOLLM2)}
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in system["content"]
    assert rest == [user]
    system, *rest = prompted_messages([{"role": "system", "content": "Be kind."}, user], TOOLS, SMOLLM2)
    assert system == {"role": "system", "content": f"Be kind.\n\n{instructions(TOOLS, SMOLLM2)}"}


def test_calls_and_results_become_text() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("get_weather", city="Rome"), call("f")]},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"},
        {"role": "tool", "tool_call_id": "y", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [call("f")]},
        {"role": "tool", "tool_call_id": "z", "content": "1"},
        {"role": "assistant", "content": "Bye"},
    ]
    assert prompted_messages(chat, [], SMOLLM2) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": 'I look.\n<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}}, '
            '{"name": "f", "arguments": {}}]</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\n\n</tool_response>",
        },
        {"role": "assistant", "content": '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'},
        {"role": "user", "content": "<tool_response>\n1\n</tool_response>"},
        {"role": "assistant", "content": "Bye"},
    ]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_form_that_is_described_is_one_that_the_parser_reads(name: str) -> None:
    text = instructions(TOOLS, TOOL_FORMATS[name])
    example = text.partition("in this form:\n")[2].rpartition("\n")[0]
    parameters = {"type": "object", "properties": {"name_of_parameter": {"type": "string"}}}
    parser = MessageParser(MessageFormat(TOOL_FORMATS[name]), [Tool("name_of_tool", parameters)])
    assert join_events([*parser.feed(example), *parser.end()]) == [
        ToolCallBegin(0, "name_of_tool"),
        ToolArgumentsDelta(0, '{"name_of_parameter": "value"}'),
        ToolCallEnd(0),
    ]
