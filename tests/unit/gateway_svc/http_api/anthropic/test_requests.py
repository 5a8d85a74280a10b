"""Bodies of Anthropic's /v1/messages."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway_svc.chat_validation import MAX_VARIABLES_LENGTH
from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, PromptEnd, ToolCall, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.anthropic.requests import read_count, read_messages
from gateway_svc.unvalidated_request import ResponseMode, UnvalidatedRequest
from svc_common.errors import QuireError, Reason

USER = {"role": "user", "content": "Hi."}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}


def read(**fields: Any) -> UnvalidatedRequest:
    body = {"max_tokens": 9, "messages": [USER]} | fields
    return read_messages(MessagesBody.of(body), None).prompt.unvalidated


def chat(**fields: Any) -> ChatPrompt:
    prompt = read(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused(**fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(QuireError) as error:
        read(**fields)
    return error.value.reason, error.value.field


def test_parameters_of_sampling_and_stopping() -> None:
    request = read(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stop_sequences=["END"],
        stream=True,
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    assert request == UnvalidatedRequest(
        prompt=ChatPrompt([ChatMessage("user", "Hi.")], must_limit_reasoning=False),
        model="m",
        sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 4},
        max_tokens=9,
        stop=["END"],
        response_mode=ResponseMode.STREAMED,
    )


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", [{"type": "text", "text": "Be brief."}, {"type": "text",
    "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]], ids=["text", "blocks"])  # fmt: skip
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert chat(system=system).messages[0] == ChatMessage("system", "Be brief.\nBe kind.")


def test_calls_and_results_are_messages() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1"}
    text = {"type": "text", "text": "4 degrees"}
    messages = [
        USER,
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "I look."}, CALL]},
        {
            "role": "user",
            "content": [
                {**result, "content": [text]},
                {**result, "content": "rain", "is_error": True},
                result,
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    assert chat(messages=messages).messages == [
        ChatMessage("user", "Hi."),
        ChatMessage(
            "assistant",
            "I look.",
            (ToolCall("get_weather", '{"city": "Oslo"}', "toolu_1"),),
            reasoning="Hm.",
        ),
        ChatMessage("tool", "4 degrees", tool_call_id="toolu_1"),
        ChatMessage("tool", "rain", tool_call_id="toolu_1"),
        ChatMessage("tool", "", tool_call_id="toolu_1"),
        ChatMessage("user", "So?"),
    ]


def test_consecutive_messages_of_a_role_are_one_turn() -> None:
    text = {"role": "assistant", "content": "I look."}
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert chat(messages=[USER, USER, text, {**text, "content": [CALL]}, system, USER]).messages == [
        ChatMessage("user", "Hi.\nHi."),
        ChatMessage("assistant", "I look.", (ToolCall("get_weather", '{"city": "Oslo"}', "toolu_1"),)),
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hi."),
    ]


def test_the_messages_of_a_turn_are_joined_in_time_linear_in_their_number() -> None:
    text = "a" * 1_000
    users = [{"role": "user", "content": text}] * 4_000
    calls = [{"role": "assistant", "content": [{"type": "text", "text": text}, CALL]}] * 4_000
    body = MessagesBody.of({"max_tokens": 9, "messages": [*users, *calls]})
    began = time.process_time()
    prompt = read_messages(body, None).prompt.unvalidated.prompt
    assert time.process_time() - began < 2  # copies of what is there before each message take several times as long
    assert isinstance(prompt, ChatPrompt)
    user, answer = prompt.messages
    assert user.content == answer.content == "\n".join([text] * 4_000)
    assert len(answer.tool_calls) == 4_000


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert chat().prompt_end is PromptEnd.ANSWER
    assert chat(messages=[USER, {"role": "assistant", "content": "{"}]).prompt_end is PromptEnd.CONTINUATION


def test_tools() -> None:
    tool = {"name": "f", "description": "F.", "input_schema": {"type": "object"}, "strict": True}
    assert chat(tools=[tool]).tools == (ClientTool("f", "F.", '{"type": "object"}', True),)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice(ToolMode.AUTO)),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ({"type": "tool", "name": "f"}, ToolChoice(ToolMode.NAMED, "f")),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert chat(tool_choice=choice).tool_choice == expected
    assert chat(tool_choice=choice).parallel_tool_calls is None
    assert chat(tool_choice={**choice, "disable_parallel_tool_use": True}).parallel_tool_calls is False


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1_024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2_048}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "xhigh"),
    ],
)
def test_thinking_is_an_effort(fields: Any, effort: str | None) -> None:
    assert chat(**fields).reasoning_effort == effort


def test_variables_of_the_template_are_vllms() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_variables == '{"enable_thinking": false}'
    assert chat().template_variables is None
    too_long = {"a": "a" * MAX_VARIABLES_LENGTH}
    assert refused(chat_template_kwargs=too_long) == (Reason.INVALID_FIELD, "chat_template_kwargs")


def test_a_budget_is_the_limit_of_the_reasoning() -> None:
    assert chat(thinking={"type": "enabled", "budget_tokens": 1_024}).max_reasoning_tokens == 1_024
    assert chat(thinking={"type": "disabled", "budget_tokens": 1_024}).max_reasoning_tokens is None
    assert chat(thinking={"type": "adaptive"}).max_reasoning_tokens is None
    assert chat().max_reasoning_tokens is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "object"}}}, "output_format"),
    ],
)
def test_a_format_is_a_constraint(fields: Any, path: str) -> None:
    assert read(**fields).constraint == UnvalidatedConstraint(Field.JSON_SCHEMA, '{"type": "object"}')
    body = MessagesBody.of({"max_tokens": 9, "messages": [USER], **fields})
    assert read_messages(body, None).prompt.field_path(Field.JSON_SCHEMA) == f"{path}.schema"


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


BLOCK = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"max_tokens": None}, Reason.INVALID_FIELD, "max_tokens"),
        ({"messages": None}, Reason.INVALID_FIELD, "messages"),
        ({"messages": []}, Reason.INVALID_FIELD, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, Reason.INVALID_FIELD, "messages[0].role"),
        (message(CALL, role="system"), Reason.INVALID_FIELD, f"{BLOCK}.type"),
        ({"speed": "fast"}, Reason.FEATURE_UNSUPPORTED, "speed"),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            Reason.FEATURE_UNSUPPORTED,
            "thinking.display",
        ),
        ({"thinking": {"type": "between_tools"}}, Reason.INVALID_FIELD, "thinking.type"),
        ({"messages": [{"role": "user"}]}, Reason.INVALID_FIELD, "messages[0].content"),
        (message(), Reason.INVALID_FIELD, "messages[0].content"),
        (message({"type": "image", "source": {}}), Reason.FEATURE_UNSUPPORTED, f"{BLOCK}.type"),
        (message({"type": "document", "source": {}}), Reason.FEATURE_UNSUPPORTED, f"{BLOCK}.type"),
        (message({"text": "a"}), Reason.INVALID_FIELD, f"{BLOCK}.type"),
        (message({"type": "text"}), Reason.INVALID_FIELD, f"{BLOCK}.text"),
        (message(5), Reason.INVALID_FIELD, BLOCK),
        (message(CALL), Reason.INVALID_FIELD, f"{BLOCK}.type"),
        (message({"type": "tool_result", "tool_use_id": ""}), Reason.INVALID_FIELD, f"{BLOCK}.tool_use_id"),
        (message({"type": "tool_result", "tool_use_id": "1"}, role="assistant"), Reason.INVALID_FIELD, f"{BLOCK}.type"),
        (
            message({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
            Reason.FEATURE_UNSUPPORTED,
            f"{BLOCK}.content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, Reason.FEATURE_UNSUPPORTED, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, Reason.INVALID_FIELD, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, Reason.INVALID_FIELD, "tool_choice.name"),
        ({"tool_choice": "auto"}, Reason.INVALID_FIELD, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, Reason.INVALID_FIELD, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, Reason.FEATURE_UNSUPPORTED, "mcp_servers"),
        ({"container": "x"}, Reason.FEATURE_UNSUPPORTED, "container"),
        ({"n": 2}, Reason.FEATURE_UNSUPPORTED, "n"),
        ({"min_p": 0.5}, Reason.FEATURE_UNSUPPORTED, "min_p"),
        ({"stop": ["a"]}, Reason.FEATURE_UNSUPPORTED, "stop"),
    ],
)
def test_other_bodies_are_refused_by_the_field(fields: Any, reason: Reason, field: str) -> None:
    assert refused(**fields) == (reason, field)


@pytest.mark.parametrize(("name", "neutral"), MessagesBody.unserved.items())
def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(
    name: str, neutral: Sequence[Any]
) -> None:
    assert refused(**{name: "something"}) == (Reason.FEATURE_UNSUPPORTED, name)
    for value in (None, *neutral):
        assert read(**{name: value}) == read()


@pytest.mark.parametrize("name", MessagesBody.without_effect)
def test_fields_without_an_effect_are_accepted(name: str) -> None:
    assert read(**{name: {"any": "value"}}) == read()


def test_tokens_are_counted_without_max_tokens() -> None:
    prompt = read_count(MessagesBody.of({"messages": [USER], "system": "a"}), None).unvalidated.prompt
    assert prompt == ChatPrompt([ChatMessage("system", "a"), ChatMessage("user", "Hi.")], must_limit_reasoning=False)


def test_fields_have_the_names_of_the_body() -> None:
    path = read_messages(MessagesBody.of({"max_tokens": 9, "messages": [USER]}), None).prompt.field_path
    assert path(Field.STOP, 2) == "stop_sequences[2]"
    assert path("sampling.top_p") == "top_p"
    assert path(Field.PROMPT_END) == "messages"
    assert path(Field.TEMPLATE_VARIABLES) == "chat_template_kwargs"
    answer = chat(**message(CALL, role="assistant")).messages[0]
    assert answer.place("tool_calls") == answer.place("reasoning") == "messages[0].content"
