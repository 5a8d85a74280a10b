"""The text that tokens contribute."""

import pytest

from gateway_values import (
    KINDS,
    added_tokens_tokenizer,
    id_of,
    sentencepiece_tokenizer,
    vocabulary_of,
    wordpiece_tokenizer,
)
from tiny_model import tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_up_the_decoded_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    vocabulary = vocabulary_of(tokenizer)
    for first in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([first, first], skip_special_tokens=False)
        pieces = vocabulary.first_piece(first) + vocabulary.piece(first)
        assert pieces.decode("utf-8", "replace") == text, tokenizer.id_to_token(first)


def test_a_byte_is_itself_even_where_it_is_no_character() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    pieces = [vocabulary.piece(token_id) for token_id in tokenizer.encode("ß").ids]
    assert b"".join(pieces) == "ß".encode()
    assert len(pieces) == 2


def test_byte_tokens_of_sentencepiece_are_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    assert vocabulary_of(tokenizer).piece(id_of(tokenizer, "<0xE4>")) == b"\xe4"


def test_a_word_keeps_its_space_unless_it_begins_the_text() -> None:
    tokenizer = sentencepiece_tokenizer()
    vocabulary, word = vocabulary_of(tokenizer), id_of(tokenizer, "▁a")
    assert (vocabulary.piece(word), vocabulary.first_piece(word)) == (b" a", b"a")


def test_a_continued_word_has_no_space() -> None:
    tokenizer = wordpiece_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.piece(id_of(tokenizer, "##a")) == b"a"
    assert vocabulary.piece(id_of(tokenizer, "a")) == b" a"


def test_added_tokens_stand_for_themselves() -> None:
    tokenizer = added_tokens_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    for text in ("<tool_call>", "｜tool｜", "<|im_end|>"):
        assert vocabulary.piece(id_of(tokenizer, text)) == text.encode()


def test_only_special_tokens_are_special() -> None:
    assert vocabulary_of(added_tokens_tokenizer()).special_ids == {0, 1, 2}


def test_an_id_beyond_the_tokenizer_contributes_nothing() -> None:
    vocabulary = vocabulary_of(tiny_tokenizer())
    assert (vocabulary.piece(100_000), vocabulary.first_piece(100_000)) == (b"", b"")


def test_a_part_of_a_character_reads_as_a_replacement() -> None:
    tokenizer = tiny_tokenizer()
    first_byte = tokenizer.encode("ß").ids[0]
    assert vocabulary_of(tokenizer).token_text(first_byte) == "\ufffd"
