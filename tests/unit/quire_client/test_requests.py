"""Conversion of Python values to request messages."""

import json
import re
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client import AllowedTools, CustomTool, GenerationOptions, Message, QuireError, Tool, ToolCall
from quire_client.chats import CHAT_OPTIONS, Messages
from quire_client.embed_requests import embed_request
from quire_client.requests import chat_request, completion_request, detokenize_request, tokenize_request

EVERY_OPTION: GenerationOptions = {
    "model": "tiny",
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": -1,
    "min_p": 0.125,
    "typical_p": 0.75,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 2.5,
    "seed": -(2**63),
    "logit_bias": {5: -100.0},
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "include_stop": True,
    "n": 4,
    "best_of": 5,
    "beam_width": 6,
    "length_penalty": -0.5,
    "early_stopping": "never",
    "logprobs": 0,
    "request_id": "mine",
    "priority": -2,
    "retention": 60,
    "keep_special_tokens": True,
    "allowed_token_ids": [3, 4],
    "bad_words": ["a", "b"],
    "logprob_token_ids": [5],
    "prompt_logprobs": 2,
    "echo": True,
    "truncate_prompt_tokens": -1,
    "truncation_side": "right",
    "spaces_between_special_tokens": False,
}

WRONG: Any = 5

# A request has one of these. Each with its place and value in the message.
CONSTRAINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "json_schema": ({"type": "object"}, {"json_schema": '{"type": "object"}'}),
    "json_object": (True, {"json_object": {}}),
    "regex": ("a+", {"regex": "a+"}),
    "choice": (["a", "b"], {"choice": {"choices": ["a", "b"]}}),
    "grammar": ('start: "a"', {"grammar": 'start: "a"'}),
    "gbnf": ('root ::= "a"', {"gbnf": 'root ::= "a"'}),
}


def test_every_option_has_its_place_in_the_message() -> None:
    message = MessageToDict(completion_request("x", EVERY_OPTION), preserving_proto_field_name=True)

    assert message == {
        "model": "tiny",
        "text": "x",
        "sampling": {
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": -1,
            "min_p": 0.125,
            "typical_p": 0.75,
            "presence_penalty": -1.5,
            "frequency_penalty": 1.5,
            "repetition_penalty": 2.5,
            "seed": str(-(2**63)),
            "logit_bias": {"5": -100.0},
            "allowed_token_ids": [3, 4],
            "bad_words": ["a", "b"],
        },
        "stopping": {
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "include_stop": True,
        },
        "n": 4,
        "best_of": 5,
        "beam_search": {"width": 6, "length_penalty": -0.5, "early_stopping": "EARLY_STOPPING_NEVER"},
        "logprobs": 0,
        "request_id": "mine",
        "priority": -2,
        "retention": {"seconds": 60},
        "keep_special_tokens": True,
        "logprob_token_ids": [5],
        "prompt_logprobs": 2,
        "echo": True,
        "truncate_prompt_tokens": -1,
        "truncation_side": "TRUNCATION_SIDE_RIGHT",
        "spaces_between_special_tokens": False,
    }


def test_every_option_there_is_was_tried() -> None:
    options = {*EVERY_OPTION, *CONSTRAINTS, *CHAT_OPTIONS}
    assert options == GenerationOptions.__annotations__.keys()


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_has_its_place_in_the_message(name: str) -> None:
    value, expected = CONSTRAINTS[name]
    options: Any = {name: value}

    message = MessageToDict(completion_request("x", options), preserving_proto_field_name=True)

    assert message == {"text": "x", "constraint": expected}


def test_a_schema_may_be_text() -> None:
    assert completion_request("x", {"json_schema": "true"}).constraint.json_schema == "true"


def test_no_choices_are_sent_for_the_server_to_reject() -> None:
    assert completion_request("x", {"choice": []}).constraint.WhichOneof("kind") == "choice"


def test_a_json_object_that_is_not_wanted_is_absent() -> None:
    assert completion_request("x", {"json_object": False}) == completion_request("x", {})


@pytest.mark.parametrize(
    "options", [{"regex": "a", "choice": ["a"]}, {"choice": "a"}, {"json_object": 1}, {"json_schema": 3}, {"regex": 3}]
)
def test_wrong_constraints_are_type_errors(options: Any) -> None:
    with pytest.raises(TypeError):
        completion_request("x", options)


@pytest.mark.parametrize("name", GenerationOptions.__annotations__)
def test_none_is_absent(name: str) -> None:
    options: Any = {name: None}

    assert completion_request("x", options) == completion_request("x", {})


@pytest.mark.parametrize("value", ["none", "until_end"])
def test_a_retention_may_be_a_word(value: Any) -> None:
    assert completion_request("x", {"retention": value}).retention.WhichOneof("kind") == value


def test_zero_is_not_absent() -> None:
    generation = completion_request("x", {"temperature": 0, "seed": 0, "max_tokens": 0})

    assert generation.sampling.HasField("temperature")
    assert generation.sampling.HasField("seed")
    assert generation.stopping.HasField("max_tokens")
    assert not generation.sampling.HasField("top_p")


def test_one_stop_string_needs_no_list() -> None:
    assert list(completion_request("x", {"stop": "###"}).stopping.stop) == ["###"]


@pytest.mark.parametrize("ids", [[], [0, 5], (0, 5), range(3)])
def test_token_ids_are_a_prompt_even_where_there_are_none(ids: Any) -> None:
    generation = completion_request(ids, {})

    assert generation.WhichOneof("prompt") == "token_ids"
    assert list(generation.token_ids.ids) == list(ids)


@pytest.mark.parametrize("ids", [b"hello", bytearray(b"a"), memoryview(b"a"), [True, 5]])
def test_bytes_and_booleans_are_no_token_ids(ids: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompt.*, not (bytes|bytearray|memoryview|bool)$"):
        completion_request(ids, {})
    with pytest.raises(TypeError, match=r"^inputs\[1\].*, not "):
        embed_request([[5], ids], {})
    with pytest.raises(TypeError, match=r"^token_ids.*, not "):
        detokenize_request(ids, None, False)


def test_an_empty_chat_is_a_chat() -> None:
    assert chat_request([], {}).WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"top_k": 2**31}, "sampling.top_k"),
        ({"stop_token_ids": [1, -1]}, "stopping.stop_token_ids"),
        ({"logit_bias": {-1: 0.5}}, "sampling.logit_bias"),
        ({"stop": "\ud800"}, "stopping.stop"),
        ({"request_id": "\ud800"}, "request_id"),
    ],
)
def test_what_the_message_cannot_hold_is_refused_as_by_the_server(options: Any, field: str) -> None:
    with pytest.raises(QuireError) as caught:
        completion_request("x", options)

    assert (caught.value.reason, caught.value.field) == ("INVALID_FIELD", f"generation.{field}")


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: completion_request("\ud800", {}), "generation.text"),
        (lambda: completion_request([2**32], {}), "generation.token_ids.ids"),
        (lambda: chat_request([{"role": "user", "content": "\ud800"}], {}), "generation.chat.messages[0].content"),
        (lambda: tokenize_request("\ud800", None), "text"),
        (lambda: detokenize_request([-1], None, False), "token_ids"),
    ],
)
def test_a_prompt_that_the_message_cannot_hold_is_named(build: Any, field: str) -> None:
    with pytest.raises(QuireError) as caught:
        build()

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (False, "EARLY_STOPPING_HEURISTIC"),
        (True, "EARLY_STOPPING_AT_WIDTH"),
        ("never", "EARLY_STOPPING_NEVER"),
    ],
)
def test_early_stopping_is_spelled_as_in_transformers(value: Any, name: str) -> None:
    search = completion_request("x", {"beam_width": 2, "early_stopping": value}).beam_search

    assert pb.EarlyStopping.Name(search.early_stopping) == name


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"stop": [1]},
        {"logit_bias": {"a": 1}},
        {"n": 1.5},
        {"early_stopping": 1},
        {"early_stopping": "soon"},
        {"truncation_side": "top"},
        {"retention": "soon"},
        {"retention": 1.5},
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(options: Any) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        completion_request("x", options)


def test_an_option_that_does_not_exist_is_a_type_error_with_the_nearest_name() -> None:
    options: Any = {"temprature": 1}

    with pytest.raises(TypeError, match="did you mean temperature"):
        completion_request("x", options)


def test_a_message_with_other_fields_is_refused() -> None:
    with pytest.raises(TypeError, match=r"messages\[0\]"):
        chat_request([{"role": "user", "content": "x", "nickname": "me"}], {})


def test_a_chat_has_tools_calls_and_results() -> None:
    call = ToolCall("call_1", "get_weather", '{"city": "Paris"}')
    messages: Messages = [
        Message("user", "Weather?", name="Ann"),
        Message("assistant", "", tool_calls=[call], reasoning="Hm."),
        {"role": "tool", "content": "20", "tool_call_id": "call_1"},
    ]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [Tool("get_weather", "Weather of a city.", schema, strict=True), Tool("now")]
    chat = chat_request(
        messages,
        {
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "max_reasoning_tokens": 0,
            "max_tokens": 5,
        },
    ).chat
    assert chat == pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="Weather?", name="Ann"),
            pb.ChatMessage(
                role="assistant",
                tool_calls=[pb.ToolCall(id="call_1", name="get_weather", arguments='{"city": "Paris"}')],
                reasoning="Hm.",
            ),
            pb.ChatMessage(role="tool", content="20", tool_call_id="call_1"),
        ],
        tools=[
            pb.Tool(name="get_weather", description="Weather of a city.", parameters=json.dumps(schema), strict=True),
            pb.Tool(name="now"),
        ],
        tool_mode=pb.TOOL_MODE_REQUIRED,
        parallel_tool_calls=False,
        template_kwargs='{"enable_thinking": false}',
        reasoning_effort="low",
        max_reasoning_tokens=0,
    )
    assert chat_request(messages, {"tool_choice": "now"}).chat.tool_name == "now"
    assert not chat_request(messages, {"tool_choice": None, "tools": None}).chat.WhichOneof("tool_choice")


def test_options_of_chats_are_refused_elsewhere() -> None:
    with pytest.raises(TypeError, match="tools is an option of chats"):
        completion_request("a", {"tools": []})


def test_a_chat_has_custom_tools_and_their_calls() -> None:
    tools: list[CustomTool | Tool] = [
        CustomTool("any", "Any text."),
        CustomTool("lark", grammar='start: "a"'),
        CustomTool("re", regex=""),
        Tool("f"),
    ]
    messages = [Message("assistant", "", [ToolCall("call_1", "any", input="")])]
    chat = chat_request(messages, {"tools": tools, "tool_choice": AllowedTools(["any", "f"], "required")}).chat
    assert chat == pb.Chat(
        messages=[{"role": "assistant", "tool_calls": [{"id": "call_1", "name": "any", "input": ""}]}],
        tools=[
            {"name": "any", "description": "Any text.", "custom": {}},
            {"name": "lark", "custom": {"grammar": 'start: "a"'}},
            {"name": "re", "custom": {"regex": ""}},
            {"name": "f"},
        ],
        allowed_tools={"mode": pb.TOOL_MODE_REQUIRED, "names": ["any", "f"]},
    )
    assert chat_request([], {"tool_choice": AllowedTools(("f",))}).chat.allowed_tools.mode == pb.TOOL_MODE_AUTO


def test_a_choice_of_no_tools_is_sent_for_the_server_to_reject() -> None:
    chat = chat_request([], {"tool_choice": AllowedTools([])}).chat
    assert chat.WhichOneof("tool_choice") == "allowed_tools"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [CustomTool("a", grammar="b", regex="c")]}, "tools[0].custom.grammar"),
        ({"tools": [CustomTool("a", regex=1)]}, "tools[0].custom.regex"),  # type: ignore[arg-type]
        ({"tool_choice": AllowedTools("run")}, "allowed_tools.names"),
        ({"tool_choice": AllowedTools([1])}, "allowed_tools.names"),  # type: ignore[list-item]
        ({"tool_choice": AllowedTools(["run"], "none")}, "allowed_tools.mode"),  # type: ignore[arg-type]
        ({"tool_choice": AllowedTools(["run"], ["auto"])}, "allowed_tools.mode"),  # type: ignore[arg-type]
    ],
)
def test_wrong_tools_are_type_errors(options: Any, field: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"generation.chat.{field}")):
        chat_request([], options)


def test_the_text_of_a_call_that_the_message_cannot_hold_is_named() -> None:
    with pytest.raises(QuireError) as caught:
        chat_request([Message("assistant", "", [ToolCall("c", "run", input="\ud800")])], {})

    assert caught.value.field == "generation.chat.messages[0].tool_calls[0].input"


def test_tools_and_their_calls_may_be_in_openais_form() -> None:
    schema = {"type": "object"}
    function = {"name": "now", "description": "The time.", "parameters": schema, "strict": True}
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert chat_request(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        {
            "tools": [{"type": "function", "function": function}, {"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "now"}},
        },
    ) == chat_request(
        [Message("assistant", "", [ToolCall("call_1", "now", "{}")])],
        {"tools": [Tool("now", "The time.", schema, strict=True), Tool("f")], "tool_choice": "now"},
    )


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ("hi", {}, "messages must be a list, not str"),
        (5, {}, "messages must be a list, not int"),
        ({"role": "user", "content": "hi"}, {}, "messages must be a list, not dict"),
        ([("user", "hi")], {}, "messages[0] must be a Message or a mapping, not tuple"),
        ([{"role": "user", "content": None}], {}, "generation.chat.messages[0].content cannot be a NoneType"),
        ([Message("assistant", "", WRONG)], {}, "generation.chat.messages[0].tool_calls must be a list, not int"),
        ([Message("assistant", "", [WRONG])], {}, "messages[0].tool_calls[0] must be a ToolCall or a mapping, not int"),
        ([Message("assistant", "", [{"name": "f"}])], {}, "or use ToolCall of quire_client"),
        ([], {"tools": 5}, "generation.chat.tools must be a list, not int"),
        ([], {"tools": ["f"]}, "generation.chat.tools[0] must be a Tool, a CustomTool or a mapping, not str"),
        ([], {"tools": [{"type": "custom"}]}, "or use Tool or CustomTool of quire_client"),
        ([], {"tools": [{"function": {"nam": "f"}}]}, "tools[0].function has name, description, parameters and strict"),
        ([], {"tools": [Tool("f", parameters="{}")]}, "tools[0].parameters must be a JSON schema as a mapping"),  # type: ignore[arg-type]
        ([], {"tool_choice": {"type": "allowed_tools"}}, "or use AllowedTools of quire_client"),
        ([], {"tool_choice": ["f"]}, "generation.chat.tool_name cannot be a list"),
        ([], {"max_tokens": {"a": 1}}, "generation.stopping.max_tokens cannot be a dict"),
        ([], {"logit_bias": 5}, "generation.sampling.logit_bias cannot be a int"),
        ([], {"truncation_side": ["left"]}, "truncation_side is"),
    ],
)
def test_what_is_no_chat_is_a_type_error_that_names_it(messages: Any, options: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        chat_request(messages, options)


@pytest.mark.parametrize("inputs", [5, {"a": 1}, {"a"}, None])
def test_what_is_no_list_of_inputs_is_a_type_error(inputs: Any) -> None:
    with pytest.raises(TypeError, match=f"inputs must be a text, .*, not {type(inputs).__name__}"):
        embed_request(inputs, {})


def test_numbers_may_be_those_of_numpy() -> None:
    options: Any = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "retention": np.int32(9)}
    expected = completion_request([1, 2], {"temperature": 0.5, "max_tokens": 3, "retention": 9})
    assert completion_request(np.array([1, 2]), options) == expected  # type: ignore[arg-type]
