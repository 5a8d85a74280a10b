"""Chats of bodies: the same as over gRPC, and in OpenAI's older spelling."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway_svc.chat_validation import MAX_VARIABLES_LENGTH
from gateway_svc.chats import (
    ChatMessage,
    ChatPrompt,
    ClientTool,
    CustomInput,
    PromptEnd,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import json_text, parse_body
from gateway_svc.http_api.openai import chat_fields
from gateway_svc.http_api.openai.bodies import read_chat_batch, read_chat_completion
from gateway_svc.http_api.openai.chat_fields import read_messages
from gateway_svc.http_api.openai.chat_models import ChatBatchBody, ChatBody, MessageBody
from gateway_svc.http_api.openai.choice_formats import ChatFormat
from gateway_svc.output import Chunk, FinishReason, ToolCallDelta, merge_calls
from gateway_values import make_rendering, vocabulary_of
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError
from tool_families import TOOL_FAMILIES

VOCABULARY = vocabulary_of(TOOL_FAMILIES["hermes"].tokenizer)
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "é": 1}}


def read(**fields: Any) -> PromptRequest:
    (prompt,) = read_chat_completion(
        ChatBody.read(parse_body(json.dumps({"messages": [USER], **fields}).encode())), None
    ).prompts
    return prompt


def chat(**fields: Any) -> ChatPrompt:
    prompt = read(**fields).unvalidated.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_both_protocols_make_the_same_chat() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
    messages = [
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
    ]
    over_http = chat(
        messages=messages,
        tools=[{"type": "function", "function": {**FUNCTION, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        chat_template_kwargs={"x": [1]},
        reasoning_effort="low",
        thinking_token_budget=7,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    over_grpc = api.Chat(
        messages=[
            {"role": "user", "content": "a", "name": "n"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "name": "f", "arguments": '{"b": 1}'}],
                "reasoning": "r",
            },
            {"role": "tool", "content": "t", "tool_call_id": "c"},
        ],
        tools=[{"name": "f", "description": "d", "parameters": '{"type": "object", "é": 1}', "strict": True}],
        tool_name="f",
        parallel_tool_calls=False,
        template_kwargs='{"x": [1]}',
        reasoning_effort="low",
        max_reasoning_tokens=7,
        prompt_end=api.PROMPT_END_CONTINUATION,
    )
    assert over_http == ChatPrompt.from_proto(over_grpc, "generation.chat")


GRAMMAR = {"syntax": "lark", "definition": 'start: "a"'}
REGEX = {"syntax": "regex", "definition": "a+"}


def test_both_protocols_have_custom_tools_and_allowed_ones() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "any", "input": "é\n"}}
    names = [{"type": "custom", "custom": {"name": "any"}}, {"type": "function", "function": {"name": "f"}}]
    over_http = chat(
        messages=[USER, {"role": "assistant", "tool_calls": [call]}],
        tools=[
            {"type": "custom", "custom": {"name": "any", "description": "d"}},
            {"type": "custom", "custom": {"name": "lark", "format": {"type": "grammar", "grammar": GRAMMAR}}},
            {"type": "custom", "custom": {"name": "regex", "format": {"type": "grammar", "grammar": REGEX}}},
            {"type": "function", "function": {"name": "f"}},
        ],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}},
    )
    over_grpc = api.Chat(
        messages=[USER, {"role": "assistant", "tool_calls": [{"id": "c", "name": "any", "input": "é\n"}]}],
        tools=[
            {"name": "any", "description": "d", "custom": {}},
            {"name": "lark", "custom": {"grammar": 'start: "a"'}},
            {"name": "regex", "custom": {"regex": "a+"}},
            {"name": "f"},
        ],
        allowed_tools={"mode": api.TOOL_MODE_REQUIRED, "names": ["any", "f"]},
    )
    assert over_http == ChatPrompt.from_proto(over_grpc, "generation.chat")


@pytest.mark.parametrize(
    ("fields", "effort", "limit"),
    [
        ({"thinking": {"type": "disabled"}}, "none", None),
        ({"thinking": {"type": "enabled"}}, "medium", None),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "medium", 9),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low", "thinking_token_budget": 3}, "low", 3),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, "none", None),
    ],
)
def test_thinking_is_an_effort_and_a_limit(fields: dict[str, Any], effort: str, limit: int | None) -> None:
    prompt = chat(messages=[USER], **fields)
    assert (prompt.reasoning_effort, prompt.max_reasoning_tokens) == (effort, limit)


def test_functions_and_their_calls_become_tools() -> None:
    prompt = read(
        messages=[
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
            {"role": "function", "name": "g", "content": "s"},
        ],
        functions=[FUNCTION],
        function_call={"name": "f"},
    )
    assert prompt.unvalidated.prompt == ChatPrompt(
        messages=[
            ChatMessage("user", "a"),
            ChatMessage("assistant", None, (ToolCall("f", "{}", "call_1"),)),
            ChatMessage("tool", "r", tool_call_id="call_1", name="f"),
            ChatMessage("tool", "s", name="g"),
        ],
        tools=(ClientTool("f", "d", json.dumps(FUNCTION["parameters"], ensure_ascii=False)),),
        tool_choice=ToolChoice(ToolMode.NAMED, "f"),
        parallel_tool_calls=False,
    )
    assert (prompt.field_path(Field.TOOLS), prompt.field_path(Field.TOOL_CHOICE)) == ("functions", "function_call")
    plain = read(tools=[{"function": FUNCTION}], tool_choice="required")
    assert (plain.field_path(Field.TOOLS), plain.field_path(Field.TOOL_CHOICE)) == ("tools", "tool_choice")


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_choices(choice: str) -> None:
    assert chat(tool_choice=choice).tool_choice == ToolChoice(ToolMode(choice))


def test_reasoning_has_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = chat(messages=[USER, {"role": "assistant", name: "r"}]).messages[1]
        assert message == ChatMessage("assistant", None, reasoning="r")


@pytest.mark.parametrize("content", [None, [], ""])
def test_an_answer_may_be_empty(content: Any) -> None:
    call = {"function": {"name": "f"}}
    for calls in (None, [], [call]):
        answer = {"role": "assistant", "content": content, "tool_calls": calls, "function_call": None}
        message = chat(messages=[USER, answer]).messages[1]
        assert (message.content or "", len(message.tool_calls)) == ("", len(calls or []))
    with pytest.raises(QuireError, match="must") as error:
        chat(messages=[{"role": "user", "content": content or None}])
    assert error.value.field == "messages[0].content"


def test_results_of_functions_are_of_the_latest_call_in_time_linear_in_the_messages() -> None:
    names = ["f", "g", "f"]
    calls = [{"id": f"c{index}", "function": {"name": name}} for index, name in enumerate(names)]
    answer = MessageBody.of({"role": "assistant", "tool_calls": calls})
    results = [MessageBody.of({"role": "function", "name": name, "content": ""}) for name in ("f", "g", "h")]
    began = time.process_time()
    read = read_messages([answer, *results * 5_000], "messages")
    assert [one.tool_call_id for one in read[1:]] == ["c0", "c1", None] * 5_000
    assert time.process_time() - began < 2  # a scan of all messages before each of them takes ten times as long


def test_the_chats_of_a_batch_share_what_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def count(where: str, value: Any) -> str:
        written.append(where)
        return json_text(where, value)

    monkeypatch.setattr(chat_fields, "json_text", count)
    messages = [[{"role": "user", "content": str(index)}] for index in range(100)]
    read = read_chat_batch(ChatBatchBody.of({"messages": messages, "chat_template_kwargs": {"x": [1]}}), None).prompts
    assert written == ["chat_template_kwargs"]
    prompts = [one.unvalidated.prompt for one in read]
    first = prompts[0]
    assert isinstance(first, ChatPrompt)
    assert prompts == [replace(first, messages=[ChatMessage("user", str(index))]) for index in range(100)]


def test_variables_that_are_too_long_are_refused_before_the_chats_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_fields, "read_messages", None)
    body = ChatBatchBody.of({"messages": [[USER]] * 100, "chat_template_kwargs": {"x": "a" * MAX_VARIABLES_LENGTH}})
    with pytest.raises(QuireError) as error:
        read_chat_batch(body, None)
    assert error.value.field == "chat_template_kwargs"


def test_documents_are_variables_of_the_template() -> None:
    documents = [{"title": "Moon", "text": "It is round."}]
    for variables in ({}, {"chat_template_kwargs": {"x": 1}}):
        text = chat(documents=documents, **variables).template_variables
        assert json.loads(text or "") == {**variables.get("chat_template_kwargs", {}), "documents": documents}
    assert chat(documents=[]).template_variables is None
    both = {"documents": documents, "chat_template_kwargs": {"documents": documents}}
    too_long = {"documents": [{"text": "a" * MAX_VARIABLES_LENGTH}]}
    for fields, field in ((both, "documents"), (too_long, "documents"), ({"documents": ["text"]}, "documents[0]")):
        with pytest.raises(QuireError) as error:
            chat(**fields)
        assert error.value.field == field


def test_a_tool_or_function_that_is_named_is_no_reason_to_finish() -> None:
    tools = {"tools": [{"function": FUNCTION}], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    reasons: dict[str, list[dict[str, Any]]] = {
        "stop": [tools, {"functions": [FUNCTION], "function_call": {"name": "f"}}],
        "tool_calls": [{**tools, "tool_choice": "required"}],
        "function_call": [{"functions": [FUNCTION], "function_call": "auto"}, {"functions": [FUNCTION]}],
    }
    for reason, bodies in reasons.items():
        for fields in bodies:
            body = read_chat_completion(
                ChatBody.read(parse_body(json.dumps({"messages": [USER], **fields}).encode())), None
            )
            assert ChatFormat(body.calls).finish_reason(FinishReason.TOOL_CALLS) == reason


def test_what_turns_a_feature_off_is_taken() -> None:
    plain = chat()
    off: dict[str, Any] = {
        "tools": [],
        "parallel_tool_calls": None,
        "chat_template_kwargs": None,
        "add_generation_prompt": True,
    }
    assert chat(**off, continue_final_message=False, tool_choice=None) == plain
    assert plain.prompt_end is PromptEnd.ANSWER


def test_places_of_messages_and_tools_are_as_the_client_spells_them() -> None:
    call = {"function": {"name": "f"}}
    prompt = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}], tools=[{"function": FUNCTION}])
    assert prompt.messages[1].path == "messages[1]"
    (called,) = prompt.messages[1].tool_calls
    assert called.place("name") == "messages[1].tool_calls[0].function.name"
    assert called.place("id") == "messages[1].tool_calls[0].id"
    assert prompt.tools[0].path == "tools[0].function"
    assert chat(functions=[FUNCTION]).tools[0].path == "functions[0]"


@pytest.mark.parametrize(
    ("form", "custom"),
    [
        (None, CustomInput()),
        ({"type": "text"}, CustomInput()),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}},
            CustomInput(UnvalidatedConstraint(Field.GRAMMAR, 'start: "a"')),
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
            CustomInput(UnvalidatedConstraint(Field.REGEX, "a+")),
        ),
    ],
)
def test_a_custom_tool_takes_a_text(form: Any, custom: CustomInput) -> None:
    tool = {"type": "custom", "custom": {"name": "run", "description": "d", "format": form}}
    named = {"type": "custom", "custom": {"name": "run"}}
    prompt = chat(tools=[tool, {"type": "function", "function": FUNCTION}], tool_choice=named)
    assert prompt.tools[0] == ClientTool("run", "d", custom=custom)
    assert prompt.tools[0].path == "tools[0].custom"
    assert prompt.tools[1].name == "f"
    assert prompt.tool_choice == ToolChoice(ToolMode.NAMED, "run")


def test_a_call_of_a_custom_tool_has_its_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'print("é")\n'}}
    message = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    assert message.tool_calls == (ToolCall("run", id="c", input='print("é")\n'),)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "run"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    assert chat(tool_choice=choice).tool_choice == ToolChoice(ToolMode(mode), allowed=("f", "run"))


def test_calls_of_custom_tools_in_answers() -> None:
    pieces = [ToolCallDelta(0, "", "call_1", "run", is_custom=True), ToolCallDelta(0, "1+", is_custom=True)]
    form, rendering = ChatFormat(), make_rendering(VOCABULARY)
    deltas = [form.piece(Chunk(0, 0, tool_calls=[one]), rendering, VOCABULARY, False)["delta"] for one in pieces]
    assert deltas == [
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "run", "input": ""}}]},
        {"tool_calls": [{"index": 0, "custom": {"input": "1+"}}]},
    ]
    whole = form.whole(Chunk(0, 0, tool_calls=merge_calls(pieces)), rendering, VOCABULARY)["message"]
    assert whole["tool_calls"] == [{"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "1+"}}]
