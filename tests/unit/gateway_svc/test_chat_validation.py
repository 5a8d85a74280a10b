"""Chats: what templates get of them, and what is refused."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from chat_families import byte_level, special
from gateway_svc.chat_template import ChatTemplate, ChatTemplateError
from gateway_svc.chat_validation import MAX_VARIABLES_LENGTH, ChatValidator
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
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import contract_field_path
from gateway_svc.message_formats.formats import AUTO, choose_format
from gateway_svc.validation import ROLES
from svc_common.errors import QuireError, Reason
from tool_families import TOOL_FAMILIES

USER = ChatMessage("user", "a", path="m")
HERMES = TOOL_FAMILIES["hermes"].template
CHECK = FieldChecker(contract_field_path)


def template_chat(template: ChatTemplate = HERMES, **fields: Any) -> Any:
    validator = ChatValidator(template, ROLES, choose_format(AUTO, AUTO, template.constants))
    return validator.template_chat(ChatPrompt(**{"messages": [USER], **fields}), CHECK)


def refused(**fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(QuireError) as error:
        template_chat(**fields)
    return error.value.reason, error.value.field


def test_a_message_has_the_fields_that_its_client_gave() -> None:
    message = ChatMessage("tool", "a", tool_call_id="b", name="c", reasoning="d")
    assert template_chat(messages=[USER, message]).messages == [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "a", "name": "c", "reasoning_content": "d", "tool_call_id": "b"},
    ]


def test_tools_have_the_form_of_openai_and_parameters() -> None:
    tools = [ClientTool("a", None, None, is_strict=True), ClientTool("b", "c", '{"type": "object", "x": 1.0}')]
    assert template_chat(tools=tools).tools == [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}},
        {"type": "function", "function": {"name": "b", "description": "c", "parameters": {"type": "object", "x": 1.0}}},
    ]


CUT = ["", " ", "{", '{"city": "Par', '{"a": NaN}', "{'a': True}"]


@pytest.mark.parametrize("text", ["{}", *CUT])
def test_a_call_may_lack_arguments_or_have_some_that_were_cut(text: str) -> None:
    messages = [USER, ChatMessage("assistant", None, (ToolCall("a", text),))]
    (call,) = template_chat(messages=messages).messages[1]["tool_calls"]
    assert call == {"type": "function", "function": {"name": "a", "arguments": {}}}


DEEP = '{"a":' * 101 + "1" + "}" * 101
WRONG_JSON = [
    "[]",
    "1",
    "null",
    DEEP,
    "[" * 100_000,
    '{"a": "\\ud800"}',
    "\ud800",
]


@pytest.mark.parametrize("text", WRONG_JSON, ids=range(len(WRONG_JSON)))
def test_what_is_no_json_object_is_refused_by_its_place(text: str) -> None:
    call = ChatMessage("assistant", None, (ToolCall("a", text, path="m.tool_calls[0]"),))
    assert refused(messages=[call]) == (Reason.INVALID_FIELD, "m.tool_calls[0].arguments")
    assert refused(tools=[ClientTool("a", None, text, path="t")]) == (Reason.INVALID_FIELD, "t.parameters")
    assert refused(template_variables=text)[1] == "chat.template_kwargs"


@pytest.mark.parametrize("text", CUT)
def test_schemas_and_variables_are_not_cut(text: str) -> None:
    assert refused(tools=[ClientTool("a", None, text, path="t")]) == (Reason.INVALID_FIELD, "t.parameters")
    assert refused(template_variables=text) == (Reason.INVALID_FIELD, "chat.template_kwargs")


CALL = (ToolCall("a", "{}"),)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ChatMessage("user", "a", CALL, path="m"), "m.tool_calls"),
        (ChatMessage("assistant", "a", CALL * 129, path="m"), "m.tool_calls"),
        (ChatMessage("assistant", "a", (ToolCall("", "{}", path="c"),), path="m"), "c.name"),
        (ChatMessage("assistant", "a", (ToolCall("a" * 257, "{}", path="c"),), path="m"), "c.name"),
        (ChatMessage("assistant", "a", (ToolCall("a", "{}", "a" * 257, path="c"),), path="m"), "c.id"),
        (ChatMessage("assistant", "a", (ToolCall("a", "{}", path="c", input="b"),), path="m"), "c.input"),
        (ChatMessage("assistant", "a", (ToolCall("a", path="c", input="\ud800"),), path="m"), "c.input"),
        (ChatMessage("assistant", "a", reasoning="\ud800", path="m"), "m.reasoning"),
    ],
)
def test_messages_are_refused_by_their_place(message: ChatMessage, field: str) -> None:
    assert refused(messages=[message]) == (Reason.INVALID_FIELD, field)


@pytest.mark.parametrize("text", ["", 'print("é\\")\n', "{}"])
def test_the_text_of_a_custom_tool_is_an_argument_for_the_template(text: str) -> None:
    messages = [USER, ChatMessage("assistant", None, (ToolCall("run", id="c", input=text),))]
    (call,) = template_chat(messages=messages).messages[1]["tool_calls"]
    assert call["function"] == {"name": "run", "arguments": {"input": text}}


NAMED = ToolChoice(ToolMode.NAMED, "b")
CUSTOM = CustomInput()


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([ClientTool(f"a{index}") for index in range(129)], None, "chat.tools"),
        ([ClientTool("a", "b" * 2**18)], None, "chat.tools"),
        ([ClientTool("a"), ClientTool("a", path="t")], None, "t.name"),
        ([ClientTool("a b", path="t")], None, "t.name"),
        ([ClientTool("a")], NAMED, "chat.tool_choice"),
        ([], NAMED, "chat.tool_choice"),
        ([], ToolChoice(ToolMode.REQUIRED), "chat.tool_choice"),
        ([], ToolChoice(allowed=("a",)), "chat.tool_choice"),
        ([ClientTool("a")], ToolChoice(allowed=("a", "b")), "chat.tool_choice"),
        ([ClientTool("a")], ToolChoice(allowed=("a",) * 129), "chat.tool_choice"),
        ([ClientTool("a", parameters="{}", custom=CUSTOM, path="t")], None, "t.parameters"),
        ([ClientTool("a", is_strict=True, custom=CUSTOM, path="t")], None, "t.strict"),
    ],
)
def test_tools_and_choices_are_refused_by_their_field(
    tools: list[ClientTool], choice: ToolChoice | None, field: str
) -> None:
    assert refused(tools=tools, tool_choice=choice) == (Reason.INVALID_FIELD, field)


PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}", {})


def test_a_model_without_a_format_of_calls_refuses_tools_by_name() -> None:
    assert refused(template=PLAIN, tools=[ClientTool("a")]) == (Reason.FEATURE_UNSUPPORTED, "chat.tools")
    call = ChatMessage("assistant", None, CALL, path="m")
    assert refused(template=PLAIN, messages=[call]) == (Reason.FEATURE_UNSUPPORTED, "m.tool_calls")
    none = template_chat(template=PLAIN, tools=[ClientTool("a")], tool_choice=ToolChoice(ToolMode.NONE))
    assert (none.tools, none.callable_tools) == (None, [])


def test_a_template_without_tools_gets_them_as_text_where_the_operator_names_a_format() -> None:
    validator = ChatValidator(PLAIN, ROLES, choose_format("hermes", AUTO, PLAIN.constants))
    messages = [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", None, (ToolCall("get_weather", '{"city": "Paris"}', "call_1"),)),
        ChatMessage("tool", "20", tool_call_id="call_1"),
    ]
    chat = validator.template_chat(ChatPrompt(messages, [ClientTool("get_weather")]), CHECK)
    assert [tool["function"]["name"] for tool in chat.callable_tools] == ["get_weather"]
    text = PLAIN.render(chat)
    assert text.startswith("[system] ")
    assert '"name": "get_weather"' in text
    assert '[assistant] <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n' in text
    assert text.endswith("[user] <tool_response>\n20\n</tool_response>\n")
    # Chats without tools and calls stay as they are.
    plain = validator.template_chat(ChatPrompt([ChatMessage("user", "a")], ()), CHECK)
    assert PLAIN.render(plain) == "[user] a\n"


def test_a_template_that_takes_calls_writes_them_itself_beside_tools_in_the_systems_message() -> None:
    source = TOOL_FAMILIES["hermes"].source.replace("{%- if tools %}", "{%- if false %}")
    template = ChatTemplate(source, {})
    validator = ChatValidator(template, ROLES, choose_format(AUTO, AUTO, template.constants))
    messages = [
        ChatMessage("system", "Be brief."),
        USER,
        ChatMessage("assistant", None, (ToolCall("get_weather", "{}"),)),
        ChatMessage("tool", "20"),
    ]
    chat = validator.template_chat(ChatPrompt(messages, [ClientTool("get_weather")]), CHECK)
    system, *others = chat.messages
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name": "get_weather"' in system["content"]
    assert [message["role"] for message in others] == ["user", "assistant", "tool"]
    assert "tool_calls" in others[1]
    assert template.render(chat).count("<tool_response>\n20\n</tool_response>") == 1


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_described_in_the_message_of_the_developer_that_comes_first(role: str) -> None:
    validator = ChatValidator(PLAIN, ROLES, choose_format("hermes", AUTO, PLAIN.constants))
    messages = [ChatMessage(role, "Be brief."), USER]
    chat = validator.template_chat(ChatPrompt(messages, [ClientTool("get_weather")]), CHECK)
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.messages[0]["content"].startswith("Be brief.\n\n")


def test_a_template_that_leaves_calls_out_gets_them_as_text() -> None:
    source = "{{ tools | tojson }}\n{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(source, {})
    validator = ChatValidator(template, ROLES, choose_format("hermes", AUTO, template.constants))
    messages = [USER, ChatMessage("assistant", "b", CALL)]
    text = template.render(validator.template_chat(ChatPrompt(messages, [ClientTool("get_weather")]), CHECK))
    assert text.count("get_weather") == 1
    assert text.endswith('[assistant] b\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n')


def test_variables_go_to_the_template_unless_it_has_them_already() -> None:
    assert template_chat(template_variables='{"enable_thinking": false}').variables == {"enable_thinking": False}
    template = ChatTemplate("{{ bos_token }}{{ x }}", {"bos_token": "<s>"})
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "namespace", "strftime_now"):
        text = json.dumps({name: 1})
        assert refused(template=template, template_variables=text) == (Reason.INVALID_FIELD, "chat.template_kwargs")
    assert template.render(template_chat(template=template, template_variables='{"x": "y", "self": 1}')) == "<s>y"
    assert refused(template_variables=json.dumps({"a": "b" * MAX_VARIABLES_LENGTH}))[1] == "chat.template_kwargs"


def test_documents_are_objects_and_for_a_template_that_takes_them() -> None:
    template = ChatTemplate("{% for one in documents or () %}{{ one.text }};{% endfor %}", {})
    for documents, text in (([{"text": "a"}, {"text": "b"}], "a;b;"), ([], ""), (None, "")):
        variables = json.dumps({"documents": documents})
        assert template.render(template_chat(template=template, template_variables=variables)) == text
    wrong: Any
    for wrong in ("a", {"text": "a"}, ["a"], [[]]):
        variables = json.dumps({"documents": wrong})
        assert refused(template=template, template_variables=variables) == (
            Reason.INVALID_FIELD,
            "chat.template_kwargs",
        )
    given = json.dumps({"documents": [{"text": "a"}]})
    assert refused(template=PLAIN, template_variables=given) == (Reason.FEATURE_UNSUPPORTED, "chat.template_kwargs")


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", "high", {"enable_thinking": True}),
        ("{{ thinking }}{{ reasoning_effort }}", "none", {"reasoning_effort": "none", "thinking": False}),
        ("{{ x }}", "none", {}),
        ("{{ x }}", "high", {}),
    ],
)
def test_an_effort_is_what_the_template_reads_of_it(source: str, effort: str, expected: Any) -> None:
    template = ChatTemplate(source, {})
    assert template_chat(template=template, reasoning_effort=effort).variables == expected
    given = template_chat(template=template, reasoning_effort=effort, template_variables='{"thinking": 1}')
    assert given.variables == {**expected, "thinking": 1}
    assert refused(template=template, reasoning_effort="") == (Reason.INVALID_FIELD, "chat.reasoning_effort")


def test_a_prompt_may_end_after_the_last_message() -> None:
    assert HERMES.render(template_chat(prompt_end=PromptEnd.MESSAGE)) == "<|im_start|>user\na<|im_end|>\n"


@pytest.mark.parametrize("content", ["Once upon", " Once upon ", "\n\nOnce", "a", "assistant", "end", "id", "|", "<"])
@pytest.mark.parametrize("name", ["llama3.1", "hermes"])
def test_a_continuation_ends_where_transformers_ends_it(name: str, content: str) -> None:
    family = TOOL_FAMILIES[name]
    tokenizer = byte_level(special("<|begin_of_text|>"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=family.source, **family.special_tokens)  # type: ignore[no-untyped-call]
    messages = [USER, ChatMessage("assistant", content, path="m")]
    expected = made.apply_chat_template(
        [{"role": one.role, "content": one.content or ""} for one in messages],
        continue_final_message=True,
        tokenize=False,
    )
    chat = template_chat(template=family.template, messages=messages, prompt_end=PromptEnd.CONTINUATION)
    assert family.template.render(chat) == expected


def test_only_an_answer_can_be_continued() -> None:
    for message in (USER, ChatMessage("assistant", "", path="m"), ChatMessage("assistant", None, CALL, path="m")):
        fields = {"messages": [message], "prompt_end": PromptEnd.CONTINUATION}
        assert refused(**fields) == (Reason.INVALID_FIELD, "chat.prompt_end")


def test_a_template_that_leaves_the_content_out_cannot_continue_it() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    messages = [ChatMessage("assistant", "zzz")]
    chat = template_chat(template=template, messages=messages, prompt_end=PromptEnd.CONTINUATION)
    with pytest.raises(ChatTemplateError):
        template.render(chat)
