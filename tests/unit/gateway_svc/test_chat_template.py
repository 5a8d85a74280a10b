"""Chat templates, as Hugging Face's are."""

import json
from pathlib import Path

import pytest

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, load_chat_template

CHAT = [{"role": "user", "content": "<b>hi</b>"}]


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


def test_loop_controls_and_generation_blocks_are_known() -> None:
    assert render("{% for i in [1, 2] %}{% break %}{% endfor %}{% generation %}x{% endgeneration %}") == "x"


def test_the_time_can_be_asked_for() -> None:
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


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "yes"


def test_a_model_may_have_none(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
