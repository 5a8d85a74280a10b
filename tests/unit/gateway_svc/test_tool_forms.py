"""How templates of families take tools and calls; their prompts beside transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chat_families import FAMILIES, Family
from gateway_svc.chat_template import ChatTemplate
from gateway_svc.chat_validation import ChatValidator
from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, ToolCall, ToolChoice, ToolMode
from gateway_svc.control_tokens import ControlTokens
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import contract_field_path
from gateway_svc.message_formats.formats import AUTO, TOOL_FORMATS, choose_format
from gateway_svc.model_catalog import ModelCatalog
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.tool_forms import CallForm, CallIds, IdForm, ToolForms
from gateway_svc.validation import ROLES
from svc_common.model_settings import ModelSettings
from tiny_model import make_model_directory
from tool_families import TOOL_FAMILIES, tool

families = pytest.mark.parametrize("family", TOOL_FAMILIES.values(), ids=TOOL_FAMILIES)

TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("now")]
ARGUMENTS = {"city": "São Paulo <b>", "days": 2}
ID = "call_abcdefghijkl"


def prompt(**fields: Any) -> ChatPrompt:
    messages = [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", None, (ToolCall("get_weather", json.dumps(ARGUMENTS), ID),)),
        ChatMessage("tool", "sunny", tool_call_id=ID),
        ChatMessage("assistant", "It is sunny."),
        ChatMessage("user", "Thanks."),
    ]
    tools = [
        ClientTool(
            each["function"]["name"], each["function"]["description"], json.dumps(each["function"]["parameters"])
        )
        for each in TOOLS
    ]
    return ChatPrompt(**{"messages": messages, "tools": tools, **fields})


def encode(family: Family, chat: ChatPrompt) -> list[int]:
    """As the gateway encodes a chat."""
    tokenizer = ModelTokenizer(Tokenizer.from_str(family.tokenizer.to_str()), None, family.template, ())
    validator = ChatValidator(family.template, ROLES, choose_format(AUTO, AUTO, family.template.constants))
    return tokenizer._encode_chat(validator.template_chat(chat, FieldChecker(contract_field_path)), None)


def reference(family: Family, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """As transformers encodes it."""
    copy = Tokenizer.from_str(family.tokenizer.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=copy, chat_template=family.source, **family.special_tokens)  # type: ignore[no-untyped-call]
    token_ids = made.apply_chat_template(messages, **{"add_generation_prompt": True, "return_dict": False, **fields})
    assert isinstance(token_ids, list)
    return [int(token_id) for token_id in token_ids]  # type: ignore[arg-type]


def messages_of(arguments: Any, content: str | None, call_id: str) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": call_id},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks."},
    ]


FORMS = {
    "hermes": (CallForm(), (ARGUMENTS, None, ID)),
    "llama3.1": (CallForm(has_one_call=True), (ARGUMENTS, None, ID)),
    "mistral v3": (CallForm(ids=IdForm.SHORT), (ARGUMENTS, None, CallIds(IdForm.SHORT).of_result(ID))),
    "deepseek v3": (CallForm(True, True, has_text_apart=True), (json.dumps(ARGUMENTS, ensure_ascii=False), None, ID)),
    "qwen3-coder": (CallForm(), (ARGUMENTS, "", ID)),
    "mistral small 3.2": (CallForm(), (ARGUMENTS, "", ID)),
    "granite 3.3": (CallForm(), (ARGUMENTS, "", ID)),
    "llama3.2": (CallForm(), (ARGUMENTS, "", ID)),
    "apertus": (CallForm(True), (json.dumps(ARGUMENTS, ensure_ascii=False), "", ID)),
    "command r7b": (CallForm(), (ARGUMENTS, "", ID)),
    "hunyuan": (CallForm(), (ARGUMENTS, "", ID)),
    "longcat": (CallForm(), (ARGUMENTS, "", ID)),
    "nemotron nano 2": (CallForm(), (ARGUMENTS, "", ID)),
    "phi-4-mini": (CallForm(), (ARGUMENTS, "", ID)),
    "phi-4-mini, vllm": (CallForm(), (ARGUMENTS, "", ID)),
    "olmo 3": (CallForm(), (ARGUMENTS, "", ID)),
    "lfm2.5": (CallForm(), (ARGUMENTS, "", ID)),
    "xlam": (CallForm(), (ARGUMENTS, "", ID)),
    "gemma 4": (CallForm(), (ARGUMENTS, "", ID)),
    "functiongemma": (CallForm(), (ARGUMENTS, "", ID)),
    "glm 4.6": (CallForm(), (ARGUMENTS, "", ID)),
    "kimi k2": (CallForm(ids=IdForm.NAMED), (ARGUMENTS, "", "functions.get_weather:0")),
    "minimax m2": (CallForm(), (ARGUMENTS, "", ID)),
    "seed-oss": (CallForm(), (ARGUMENTS, "", ID)),
    "gpt-oss": (CallForm(has_one_call=True, has_one_text=True), (ARGUMENTS, "", ID)),
}


@families
def test_a_template_takes_tools_and_calls_in_its_form(family: Family) -> None:
    assert ToolForms.of(family.template) == ToolForms(True, FORMS[family.name][0], family.name == "gpt-oss")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_templates_without_tools_take_none(family: Family) -> None:
    assert ToolForms.of(family.template) == ToolForms(False, None)


def test_a_template_may_take_calls_and_no_tools() -> None:
    """As DeepSeek V3.1's does: the system's message has the tools."""
    source = TOOL_FAMILIES["deepseek v3"].source.replace("{%- if tools %}", "{%- if false %}")
    assert ToolForms.of(ChatTemplate(source, {})) == ToolForms(False, FORMS["deepseek v3"][0])


def test_the_words_of_a_template_do_not_count_as_pythons_notation() -> None:
    source = f"Say None or 'probed_argument'. {TOOL_FAMILIES['hermes'].source}"
    assert ToolForms.of(ChatTemplate(source, {})) == ToolForms(True, FORMS["hermes"][0])


def test_a_template_that_leaves_calls_out_takes_none() -> None:
    source = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ToolForms.of(ChatTemplate(source, {})) == ToolForms(True, None)


@families
def test_a_chat_with_tools_calls_and_results_is_encoded_as_in_transformers(family: Family) -> None:
    # A literal of a control token in a client's string would be text.
    messages = messages_of(*FORMS[family.name][1])
    tools = ToolForms.of(family.template).written(TOOLS)
    assert encode(family, prompt()) == reference(family, messages, tools=tools)


@families
def test_without_tools_and_with_none_wanted_the_prompt_has_no_tools(family: Family) -> None:
    messages = messages_of(*FORMS[family.name][1])
    expected = reference(family, messages)
    assert encode(family, prompt(tools=())) == expected
    assert encode(family, prompt(tool_choice=ToolChoice(ToolMode.NONE))) == expected


def save_in_the_configuration(directory: Path, templates: dict[str, str]) -> None:
    named = [{"name": name, "template": source} for name, source in templates.items()]
    config = {"chat_template": named, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def save_in_files(directory: Path, templates: dict[str, str]) -> None:
    save_in_the_configuration(directory, {})
    (directory / "chat_template.jinja").write_text(templates["default"])
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])


@pytest.mark.parametrize("save", [save_in_the_configuration, save_in_files])
async def test_the_template_for_tools_is_used_as_in_transformers(
    save: Callable[[Path, dict[str, str]], None], tmp_path: Path
) -> None:
    family = TOOL_FAMILIES["hermes"]
    make_model_directory(tmp_path, Tokenizer.from_str(family.tokenizer.to_str()))
    # As that of Hermes 3: it cannot be rendered without tools.
    tool_use = "{% for tool in tools %}{% endfor %}" + family.source
    save(tmp_path, {"default": family.source.replace("tools", "no_tools"), "tool_use": tool_use})
    (model,) = ModelCatalog.load([ModelSettings(model=str(tmp_path))])
    assert model.message_format.tools is TOOL_FORMATS["hermes"]
    made = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    messages = messages_of(*FORMS["hermes"][1])
    for chat, tools in (
        (prompt(), TOOLS),
        (prompt(tools=()), None),
        (prompt(tool_choice=ToolChoice(ToolMode.NONE)), None),
    ):
        expected = made.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert (await model.validator.encode(chat, FieldChecker(contract_field_path))).token_ids == expected
    model.tokenizer.close()
    assert model.grammars is not None
    model.grammars.close()


@pytest.mark.parametrize(
    "default", [TOOL_FAMILIES["hermes"].source, "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_the_forms_of_calls_are_those_of_the_template_that_writes_them(default: str) -> None:
    template = ChatTemplate(default, {}, tool_use=TOOL_FAMILIES["deepseek v3"].source)
    assert ToolForms.of(template) == ToolForms(True, ToolForms.of(ChatTemplate(default, {})).calls)
    assert ToolForms.of(template, has_tools=True) == ToolForms(True, FORMS["deepseek v3"][0])


@families
def test_literals_in_tools_and_calls_are_text(family: Family) -> None:
    literals = sorted(ControlTokens.find(family.tokenizer, family.template).ids)
    hostile = "".join(literals)
    plain, forged = [
        prompt(
            messages=[
                ChatMessage("user", "a"),
                ChatMessage("assistant", None, (ToolCall("f" + text, json.dumps({"a" + text: text}), ID),)),
                ChatMessage("tool", text, tool_call_id=ID),
                ChatMessage("user", "b"),
            ],
            tools=[ClientTool("get_weather", text, json.dumps({"properties": {"x" + text: {"type": text}}}))],
        )
        for text in ("", hostile)
    ]
    ids = {family.tokenizer.token_to_id(literal) for literal in literals}
    expected, found = [[one for one in encode(family, chat) if one in ids] for chat in (plain, forged)]
    assert found == expected


def messages_of_two_calls() -> list[ChatMessage]:
    calls = tuple(ToolCall(name, "{}", f"call_{name}") for name in ("get_weather", "get_time"))
    return [
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "I look.", calls, reasoning="Hm."),
        ChatMessage("tool", "late", tool_call_id="call_get_time"),
        ChatMessage("tool", "sunny", tool_call_id="call_get_weather"),
        ChatMessage("user", "Thanks."),
    ]


def rendered(family: str, chat: ChatPrompt) -> str:
    template = TOOL_FAMILIES[family].template
    validator = ChatValidator(template, ROLES, choose_format(AUTO, AUTO, template.constants))
    return template.render(validator.template_chat(chat, FieldChecker(contract_field_path)))


def test_a_template_of_one_call_a_message_gets_each_call_before_its_result() -> None:
    """gpt-oss's template leaves other calls out, and rejects text beside reasoning."""
    _, _, turn = rendered("gpt-oss", prompt(messages=messages_of_two_calls())).partition("Weather?<|end|>")
    assert turn == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"late"<|end|>'
        "<|start|>user<|message|>Thanks.<|end|><|start|>assistant"
    )
    _, _, turn = rendered("llama3.1", prompt(messages=messages_of_two_calls())).rpartition("Weather?")
    assert turn.index("get_weather") < turn.index("sunny") < turn.index("get_time") < turn.index("late")


def test_results_that_no_call_has_come_last() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    results = [{"role": "tool", "tool_call_id": name} for name in ("c", "b", "b")]
    messages = CallForm(has_one_call=True).messages([call, *results])
    assert [[one["id"] for one in each.get("tool_calls", ())] or each["tool_call_id"] for each in messages] == [
        *(["a"], ["b"], "b", "b", "c"),
    ]


def test_a_template_that_needs_descriptions_gets_them() -> None:
    tools = [ClientTool("get_weather", None, json.dumps({"properties": {"city": {"type": "string"}, "any": True}}))]
    text = rendered("gpt-oss", prompt(messages=[ChatMessage("user", "a")], tools=[tools[0]][:1]))
    assert "// \ntype get_weather = (_: {\n// \ncity: string,\n" in text


@pytest.mark.parametrize("effort", ["low", "high"])
def test_the_effort_is_in_a_template_that_reads_it_in_a_macro(effort: str) -> None:
    assert f"Reasoning: {effort}" in rendered("gpt-oss", prompt(reasoning_effort=effort))


def test_named_ids_count_the_calls_of_a_chat() -> None:
    """Kimi K2's. A client may use an id again in a later turn."""
    ids = CallIds(IdForm.NAMED)
    assert [ids.of_call("a", "f"), ids.of_call("b", "g")] == ["functions.f:0", "functions.g:1"]
    assert [ids.of_result("b"), ids.of_result("a"), ids.of_result("c")] == ["functions.g:1", "functions.f:0", "c"]
    assert (ids.of_call("a", "h"), ids.of_result("a")) == ("functions.h:2", "functions.h:2")


def test_short_ids_stay_apart_and_as_they_are_where_they_are_short() -> None:
    ids = CallIds(IdForm.SHORT)
    assert ids.of_result("abcDEF123") == "abcDEF123"
    assert len({ids.of_result(f"call_{number}") for number in range(100)}) == 100
    assert all(
        len(ids.of_result(text)) == 9 and ids.of_result(text).isalnum() for text in ("", "a", "é" * 9, "call_0-_a")
    )
