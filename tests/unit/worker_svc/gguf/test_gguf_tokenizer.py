"""How the tokenizer of a GGUF file splits texts."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from tiny_gguf import TOKENS, TinyGguf, write_tiny_gguf
from worker_svc.gguf.conversion import GgufConversion

TokenizerOf: TypeAlias = Callable[[Callable[[GGUFWriter], None]], Tokenizer]


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def tokenizer_of(tmp_path: Path, reported: list[str]) -> TokenizerOf:
    """The tokenizer that is made of a file with further fields."""

    def make(more: Callable[[GGUFWriter], None]) -> Tokenizer:
        directory = tmp_path / "model"
        directory.mkdir()
        gguf = write_tiny_gguf(tmp_path / "tiny.gguf", TinyGguf(more=more))
        GgufConversion(gguf, directory, reported.append).run(keeps_blocks=True)
        return Tokenizer.from_file(str(directory / "tokenizer.json"))

    return make


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("starcoder", ["a", "Ġ", "1", "2"]),
        ("smollm", ["a", "Ġ", "12"]),
        ("gpt-2", ["a", "Ġ", "12"]),
        ("llama-bpe", ["a", "Ġ", "12"]),
        ("qwen2", ["a", "Ġ", "1", "2"]),
        ("stablelm2", ["a", "Ġ", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_file_says(
    name: str, expected: list[str], tokenizer_of: TokenizerOf, reported: list[str]
) -> None:
    tokenizer = tokenizer_of(_with_merged_digits(name))
    assert tokenizer.encode("a 12").tokens == expected
    assert tokenizer.decode(tokenizer.encode("a 12").ids) == "a 12"
    assert reported == []


def test_a_way_to_split_texts_that_is_not_known_is_reported(tokenizer_of: TokenizerOf, reported: list[str]) -> None:
    assert tokenizer_of(_with_merged_digits("whatever")).encode("12").tokens == ["12"]
    (line,) = reported
    assert "splits texts as 'whatever', which is not known" in line
    assert "QUIRE_TOKENIZER" in line


def _with_merged_digits(name: str) -> Callable[[GGUFWriter], None]:
    """Adds how texts are split, in a vocabulary with a merge of two digits."""

    def fields(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(name)
        writer.add_token_list([*TOKENS[:-1], "12"])
        writer.add_token_merges(["1 2"])

    return fields


@pytest.mark.parametrize(
    ("add_space_prefix", "expected"), [(None, ["<s>", "▁", "h"]), (True, ["<s>", "▁", "h"]), (False, ["<s>", "h"])]
)
def test_a_space_is_added_before_texts_unless_the_file_says_otherwise(
    add_space_prefix: bool | None, expected: list[str], tokenizer_of: TokenizerOf
) -> None:
    pieces = ["▁", "h", "e", "he", "l", "ll"]
    num_bytes = len(TOKENS) - 3 - len(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), *pieces]

    def sentencepiece(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3] + [6] * num_bytes + [1] * len(pieces))
        writer.add_token_scores([0.0] * len(tokens))
        if add_space_prefix is not None:
            writer.add_add_space_prefix(add_space_prefix)

    tokenizer = tokenizer_of(sentencepiece)
    encoded = tokenizer.encode("h")
    assert encoded.tokens == expected
    assert tokenizer.decode(encoded.ids) == "h"
