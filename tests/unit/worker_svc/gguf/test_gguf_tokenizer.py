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


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-4o", ["Hello", "World'S", " ", "123", "4"]),
        ("llama-bpe", ["HelloWorld", "'S", " ", "123", "4"]),
        ("glm4", ["don", "'t", " ", "123", "4", " 你好a"]),
        ("chatglm-bpe", ["a", " ", "123", "4", ".\n"]),
        ("tekken", ["Hello", "World", " ", "1", "2"]),
        ("qwen2", ["HelloWorld", "'S", " ", "1", "2", ".\n"]),
        ("hunyuan", ["HelloWorld", "'S", " ", "1", "2", ".\n"]),
        ("minimax-m2", ["Hello", "World's", " ", "123", "4"]),
        ("dbrx", ["HelloWorld", "'S", " ", "123", "4"]),
        ("refact", ["don", "'t", " ", "1", "2", " a"]),
        ("exaone", ["don", "'t", " ", "1", "2", " a"]),
        ("command-r", ["don", "'t", " ", "1", "2", " a"]),
        ("exaone4", ["don", "'t", " 12", " a"]),
        ("olmo", ["don", "'t", " 12", " a"]),
        ("deepseek-llm", ["Ab", " c", "é", " ", "12", "你好", "x", "\n", "한국", " !?"]),
        ("deepseek-coder", ["Ab", " cé", " ", "1", "2", " ", "你好", "x", "\n", "한국", " !?"]),
        ("deepseek-v3", ["Ab", " cé", " ", "123", "4", "你好", "x", ".b", "!?\n\n", "한국"]),
        ("hunyuan-dense", ["Ab", " ", "123", "4", "カナ", "x"]),
        ("kimi-k2", ["Hello", "WORLD", "你好", "Ab", " don't", " ", "123", "45", "!?\n"]),
        ("youtu", ["Ab", "Cd's", "1", "2", " ", "한국", "ab", "，", "ㄅㄆ", "你好"]),
        ("seed-coder", ["HelloWorld", "'S", " ", "1", "2", ".", "\n"]),
        ("exaone-moe", ["to be or", ",", " ", "1", "2", "!\n", "\n"]),
        ("jais-2", ["a", "  ", " ", " b", " ", "123", "4", "!\n"]),
        ("tiny_aya", ["1", "234", "567", " Ab", "Cd's", "/\n"]),
    ],
)
def test_texts_are_split_as_the_models_own_tokenizers_do(
    name: str, pieces: list[str], tokenizer_of: TokenizerOf, reported: list[str]
) -> None:
    text = "".join(pieces)
    tokenizer = tokenizer_of(lambda writer: writer.add_tokenizer_pre(name))
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[first:end] for first, end in spans] == pieces
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert reported == []


@pytest.mark.parametrize(
    ("name", "tokens"), [("llama-bpe", ["hole"]), ("glm4", ["hole"]), ("qwen2", ["h", "o", "l", "e"])]
)
def test_a_word_that_is_a_token_may_need_no_merges(name: str, tokens: list[str], tokenizer_of: TokenizerOf) -> None:
    def fields(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(name)
        writer.add_token_list([*TOKENS[:-1], "hole"])
        writer.add_token_merges(["h e"])

    assert tokenizer_of(fields).encode("hole").tokens == tokens


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
