"""Control tokens of tokenizers and templates."""

import pytest

from chat_families import FAMILIES, Family
from gateway_svc.chat_template import ChatTemplate
from gateway_svc.control_tokens import ControlTokens, literal_pattern, renamed_tokenizer, unguessable_names
from gateway_values import KINDS


def control(family: Family) -> ControlTokens:
    return ControlTokens.find(family.tokenizer, family.template)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_special_tokens_are_control_tokens(family: Family) -> None:
    added = family.tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    assert special.items() <= control(family).ids.items()


@pytest.mark.parametrize(
    ("family", "marker"),
    [
        ("deepseek", "<｜User｜>"),
        ("phi4-mini", "<|end|>"),
        ("phi4-mini", "<|system|>"),
        ("normalized markers", "<|im_start|>"),
    ],
)
def test_markers_of_turns_are_text_in_answers_although_they_are_not_special(family: str, marker: str) -> None:
    found = control(FAMILIES[family])
    assert marker in found.ids.keys() - found.in_answers


def test_tokens_of_white_space_and_of_ordinary_text_are_no_control_tokens() -> None:
    assert not {"\n", "\n\n", "<b>", "</b>"} & control(FAMILIES["gemma"]).ids.keys()


def test_control_tokens_may_be_listed_by_the_tokenizer() -> None:
    family = FAMILIES["gemma"]
    template = ChatTemplate(family.source, family.special_tokens, ["<b>"])
    assert ControlTokens.find(family.tokenizer, template).ids.keys() - control(family).ids.keys() == {"<b>"}


def test_a_literal_of_many_is_found_as_the_longest() -> None:
    pattern = literal_pattern(["<|a|>", "<|a|>b", "<|ab", "<", "[x]"])
    assert pattern.findall("<|a|>b<|a|>c<|abc<|x[x][y]") == ["<|a|>b", "<|a|>", "<|ab", "<", "[x]"]


@pytest.mark.parametrize("kind", [*KINDS, *FAMILIES])
def test_a_renamed_tokenizer_has_the_same_ids_and_makes_no_control_token_of_a_literal(kind: str) -> None:
    tokenizer = KINDS[kind]() if kind in KINDS else FAMILIES[kind].tokenizer
    ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    names = unguessable_names(ids)
    renamed = renamed_tokenizer(tokenizer, names)
    assert {literal: renamed.token_to_id(name) for literal, name in names.items()} == ids
    assert renamed.get_vocab_size() == tokenizer.get_vocab_size()
    for text in ("ab", "a b é", " ab", "hello a"):
        assert renamed.encode(text).ids == tokenizer.encode(text).ids
    unknown = {ids.get("<unk>"), ids.get("<pad>"), ids.get("[UNK]")}  # what a character without a piece is
    for literal, name in names.items():
        assert not set(renamed.encode(f"a {literal} b").ids) & (set(ids.values()) - unknown)
        assert ids[literal] in renamed.encode(f"a {name} b").ids
