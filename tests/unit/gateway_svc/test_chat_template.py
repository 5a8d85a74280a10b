"""Chat templates in the format of Hugging Face."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat, load_chat_template
from gateway_svc.chats import PromptEnd
from gateway_svc.settings import BadSetting

CHAT = TemplateChat([{"role": "user", "content": "<b>hi</b>"}])


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(CHAT)


def test_messages_special_tokens_and_the_generation_prompt_are_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source, bos_token="<s>") == "<s>user:<b>hi</b>True"


def test_blocks_leave_no_lines_behind() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tojson_escapes_no_html_and_keeps_unicode() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_tojson_takes_what_it_takes_in_transformers() -> None:
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}") == '{"a":2,"b":1}'


def test_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none and documents is none }}") == "True"


@pytest.mark.parametrize(
    ("condition", "role"),
    [("true", "system"), ("m.role == 'developer'", "developer"), ("m.role in ['developer']", "developer")],
)
def test_a_developer_is_the_system_unless_the_template_names_it(condition: str, role: str) -> None:
    source = f"{{% for m in messages %}}{{% if {condition} %}}{{{{ m.role }}}}{{% endif %}}{{% endfor %}}"
    template = ChatTemplate(source, {})
    assert template.role("developer") == role
    assert template.render(TemplateChat([{"role": template.role("developer"), "content": "Be a developer."}])) == role
    assert template.role("user") == "user"


_OF_PARTS = "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
_OF_FIRST_PART = "{{ m['content'][0]['text'] }}"
_OF_BOTH = f"{{% if m.content is string %}}={{{{ m.content }}}}{{% else %}}{_OF_PARTS}{{% endif %}}"
_CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello "},
    {"role": "assistant", "content": "Hi"},
]


@pytest.mark.parametrize(
    ("system", "others", "expected"),
    [
        (_OF_PARTS, _OF_PARTS, "[Be brief.][Hello ][Hi]"),
        (_OF_FIRST_PART, _OF_PARTS, "[Be brief.][Hello ][Hi]"),
        ("{{ m.content | trim }}", _OF_PARTS, "[Be brief.][Hello ][Hi]"),
        (_OF_BOTH, _OF_BOTH, "[=Be brief.][=Hello ][=Hi]"),
        ("{{ raise_exception('no system') if m.content is string else m.content[0].text }}", _OF_BOTH, None),
        ("", _OF_PARTS, "[][Hello ][Hi]"),
    ],
)
def test_text_is_in_a_list_of_parts_for_messages_that_a_template_takes_only_so(
    system: str, others: str, expected: str | None
) -> None:
    form = f"{{% if m.role == 'system' %}}{system}{{% else %}}{others}{{% endif %}}"
    template = ChatTemplate(f"{{% for m in messages %}}[{form}]{{% endfor %}}", {})
    assert template.render(TemplateChat(_CONVERSATION)) == (expected or "[Be brief.][=Hello ][=Hi]")


def test_the_answer_of_a_template_that_takes_parts_continues() -> None:
    template = ChatTemplate(f"{{% for m in messages %}}[{_OF_PARTS}]{{% endfor %}}", {})
    continued = TemplateChat(_CONVERSATION, prompt_end=PromptEnd.CONTINUATION)
    assert template.render(continued) == "[Be brief.][Hello ][Hi"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    assert render("{% for i in [1, 2] %}{% break %}{% endfor %}{% generation %}x{% endgeneration %}") == "x"


def test_a_template_may_use_the_time() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('secret ' + messages[0].content) }}",
        "{{ messages[7].content }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ],
    ids=["raises", "undefined", "writes", "escapes", "fails"],
)
def test_whatever_goes_wrong_is_a_refusal_without_text(source: str) -> None:
    with pytest.raises(ChatTemplateError) as refusal:
        render(source)
    assert str(refusal.value) == ""


def test_a_file_of_its_own_holds_before_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": {"content": "E"}}))
    (tmp_path / "chat_template.jinja").write_text("new{{ eos_token }}")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "newE"


@pytest.mark.parametrize("others", [[], ["config"], ["config", "file"]], ids=str)
def test_that_of_an_earlier_processor_holds_where_there_is_no_other(others: list[str], tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    if "config" in others:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the config"}))
    if "file" in others:
        (tmp_path / "chat_template.jinja").write_text("of the file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.source == f"of the {others[-1] if others else 'processor'}"


@pytest.mark.parametrize("content", ["[1]", "no JSON"])
def test_a_processors_template_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ValueError, match=r"must be an object|Expecting value"):
        load_chat_template(tmp_path)


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "yes"


def test_chats_with_tools_have_the_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": name, "template": name} for name in ("tool_use", "rag", "default")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "default"
    assert template.render(replace(CHAT, tools=[{"type": "function"}])) == "tool_use"
    # Files replace those of the configuration.
    (tmp_path / "chat_template.jinja").write_text("own file")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(replace(CHAT, tools=[{"type": "function"}])) == "own file"


def test_a_template_of_the_setting_is_that_of_all_chats(tmp_path: Path) -> None:
    templates = [{"name": name, "template": name} for name in ("tool_use", "default")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path, "{{ 'set' }}")
    assert template is not None
    assert template.render(replace(CHAT, tools=[{"type": "function"}])) == "set"


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_chat_may_replace_the_variables_of_the_setting(has_tools: bool, tmp_path: Path) -> None:
    templates = [{"name": name, "template": "{{ a }} {{ b }} {{ documents }}"} for name in ("tool_use", "default")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path, variables='{"a": 1, "b": {"c": [2]}}')
    assert template is not None
    chat = replace(CHAT, tools=[{"type": "function"}] if has_tools else None)
    assert template.render(chat) == "1 {'c': [2]} None"
    assert template.render(replace(chat, variables={"a": False, "documents": [{}]})) == "False {'c': [2]} [{}]"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ('{"messages": []}', "QUIRE_CHAT_TEMPLATE_KWARGS must not have messages, which the template has already"),
        ('{"bos_token": ""}', "QUIRE_CHAT_TEMPLATE_KWARGS must not have bos_token, which the template has already"),
        ("[]", "QUIRE_CHAT_TEMPLATE_KWARGS is not a JSON object"),
        ("{", "QUIRE_CHAT_TEMPLATE_KWARGS is not JSON: "),
        ('{"a": NaN}', "QUIRE_CHAT_TEMPLATE_KWARGS is not JSON: NaN is no number of JSON"),
    ],
)
def test_variables_of_the_setting_that_cannot_be_used_are_named(variables: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "a", "bos_token": "<s>"}))
    with pytest.raises(BadSetting, match=f"^{why}"):
        load_chat_template(tmp_path, variables=variables)


def test_text_and_variables_are_those_of_both_templates() -> None:
    template = ChatTemplate("plain {{ one }}", {}, tool_use="tools {{ two }}")
    assert {"one", "two"} <= template.variables
    assert set(template.constants.split("\0")) == {"plain ", "tools "}
    assert template.for_chat(has_tools=True).constants == "tools "


def test_a_model_may_have_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with a template and special tokens."""
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": "E"}))
    return tmp_path


def test_another_file_replaces_it_and_gets_its_special_tokens(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("other {{ messages[0].content }}{{ eos_token }}")
    template = load_chat_template(own, str(other))
    assert template is not None
    assert template.render(CHAT) == "other <b>hi</b>E"


@pytest.mark.parametrize("source", ["{{ messages[0].role }}!", "user!\n\n", "user!{# " + "x" * 5000 + " #}"])
def test_a_template_may_stand_in_the_setting_itself(source: str, own: Path) -> None:
    template = load_chat_template(own, source)
    assert template is not None
    assert template.render(CHAT).strip() == "user!"


def test_a_tokenizer_without_a_template_may_be_given_one(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path, "{{ messages[0].content }}{{ eos_token }}")
    assert template is not None
    assert template.render(CHAT) == "<b>hi</b>"


def test_a_template_that_does_not_parse_is_refused_by_its_setting_and_line(own: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("\n{% for message in messages %}")
    with pytest.raises(BadSetting, match="QUIRE_CHAT_TEMPLATE does not parse as a Jinja template: line 2: "):
        load_chat_template(own, str(broken))
    with pytest.raises(BadSetting, match="QUIRE_CHAT_TEMPLATE does not parse as a Jinja template: line 1: "):
        load_chat_template(own, "{{ messages | no_such_filter }}")


def test_a_file_that_cannot_be_read_is_refused_by_its_setting(own: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in (str(tmp_path / "gone.jinja"), str(tmp_path), str(tmp_path / "bytes")):
        with pytest.raises(BadSetting, match=f"QUIRE_CHAT_TEMPLATE: {name} cannot be read"):
            load_chat_template(own, name)


def test_control_tokens_of_the_config_come_with_the_template(own: Path) -> None:
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_control_tokens": ["<|user|>"]}))
    for template in (load_chat_template(own), load_chat_template(own, "{{ messages }}")):
        assert template is not None
        assert template.control_tokens == ["<|user|>"]


def test_control_tokens_that_are_no_strings_are_refused(own: Path) -> None:
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_control_tokens": [1]}))
    with pytest.raises(ValueError, match="chat_control_tokens must be a list of strings"):
        load_chat_template(own)
