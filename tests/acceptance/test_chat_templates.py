"""The check of chat templates finds what it looks for."""

from pathlib import Path

import pytest
from hypothesis import settings

from gateway_svc.chat_encoder import ChatEncoder
from tests.acceptance.chat_templates import check_template, markers_in

EXAMPLES = settings(deadline=None, max_examples=10, database=None)
TEMPLATE = """\
{%- for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "chatml.jinja"
    path.write_text(TEMPLATE)
    return path


def test_markers_are_found_in_the_text_of_a_template() -> None:
    specials, ordinaries = markers_in(TEMPLATE)
    assert specials == {"<|im_start|>", "<|im_end|>"}
    assert ordinaries == {"<tools>", "</tools>", "<tool_call>", "</tool_call>"}


def test_a_template_that_is_encoded_as_in_transformers_passes(path: Path) -> None:
    outcome = check_template(path, EXAMPLES)
    assert (outcome.takes_generated_chats, outcome.takes_tools, outcome.broken) == (True, True, [])


def test_literals_that_become_control_tokens_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatEncoder, "_render", lambda self, chat, rendered, placeholders: rendered)
    broken = check_template(path, EXAMPLES).broken
    assert "chatml, byte level: control tokens come from the template alone" in broken


def test_tokens_other_than_those_of_transformers_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway_svc.chat_template.ChatTemplate.render", lambda self, chat: "another text")
    broken = check_template(path, EXAMPLES).broken
    assert "chatml, byte level: chats without literals are encoded as in transformers" in broken
    assert "chatml, byte level: a call with an object as arguments is encoded as in transformers" in broken
