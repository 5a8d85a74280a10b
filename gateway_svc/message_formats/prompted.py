"""Tools for models whose chat template has no place for them: they are described in the system's message, and calls and
results become text of other messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from gateway_svc.message_formats.description import CallSyntax, ToolFormat
from gateway_svc.message_formats.layout import write_calls

Message = Mapping[str, Any]

_RESULT_ROLES = ("tool", "function")
_EXAMPLE = ("name_of_tool", {"name_of_parameter": "value"})


def prompted_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """The same chat in messages of roles and contents alone.

    Messages and tools are as in OpenAI's API, with the arguments of calls as objects. Without tools nothing is added to
    the system's message.
    """
    plain = [message for group in _grouped(messages) for message in _plain(group, tool_format.calls)]
    if not tools:
        return plain
    text = instructions(tools, tool_format)
    if plain and plain[0]["role"] == "system":
        content = plain[0].get("content")
        return [{**plain[0], "content": f"{content}\n\n{text}" if content else text}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def instructions(tools: Iterable[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """What the system says of tools."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = write_calls(tool_format.calls, [_EXAMPLE])
    return (
        "You can call tools. They are described as JSON, one on each line:\n"
        f"<tools>\n{described}\n</tools>\n"
        "To call a tool, answer with nothing but the call, in this form:\n"
        f"{example}\n"
        "The result comes in the next message, between <tool_response> and </tool_response>."
    )


def _grouped(messages: Iterable[Message]) -> Iterable[list[Message]]:
    """Results that follow each other as one group, since templates may want users and assistants to take turns."""
    for is_result, group in groupby(messages, lambda message: message["role"] in _RESULT_ROLES):
        if is_result:
            yield list(group)
        else:
            yield from ([message] for message in group)


def _plain(group: list[Message], calls: CallSyntax) -> list[dict[str, Any]]:
    first = group[0]
    if first["role"] in _RESULT_ROLES:
        results = (f"<tool_response>\n{message.get('content') or ''}\n</tool_response>" for message in group)
        return [{"role": "user", "content": "\n".join(results)}]
    if not first.get("tool_calls"):
        return [dict(first)]
    functions = [call["function"] for call in first["tool_calls"]]
    written = write_calls(calls, [(function["name"], function["arguments"]) for function in functions])
    content = first.get("content")
    return [{"role": first["role"], "content": f"{content}\n{written}" if content else written}]
