"""The model's tokenizer."""

import json
import shutil
from base64 import b64encode
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from encoder_model import bert_processor, encoder_tokenizer, ids, make_encoder_directory, template_processor
from gateway_svc.chat_template import ChatTemplate, TemplateChat
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer, PromptTooLong, TextToEncode
from gateway_svc.validated_request import SpecialTokens, TruncationSide
from tiny_model import tiny_tokenizer

NESTED_LOOPS = "{% for a in b %}" * 25 + "{% endfor %}" * 25
"""A template that Jinja parses, and Python does not compile."""


async def test_text_becomes_tokens_and_text_again(tokenizer: ModelTokenizer) -> None:
    token_ids = await tokenizer.encode_text("hello world, 你好")
    assert await tokenizer.decode(token_ids, SpecialTokens.HIDDEN) == "hello world, 你好"


async def test_a_chat_is_rendered_up_to_the_assistant(tokenizer: ModelTokenizer) -> None:
    token_ids = await tokenizer.encode_chat(TemplateChat([{"role": "user", "content": "hello"}]))
    text = await tokenizer.decode(token_ids, SpecialTokens.KEPT)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids[0] == 1


async def test_special_tokens_are_hidden_or_kept(tokenizer: ModelTokenizer) -> None:
    token_ids = await tokenizer.encode_text("a<|im_end|>b")
    assert await tokenizer.decode(token_ids, SpecialTokens.HIDDEN) == "ab"
    assert await tokenizer.decode(token_ids, SpecialTokens.KEPT) == "a<|im_end|>b"


async def test_a_text_that_cannot_fit_is_not_tokenized(tokenizer: ModelTokenizer) -> None:
    longest = len("<|endoftext|>")
    assert await tokenizer.encode_text("a" * longest * 4, max_tokens=4)
    with pytest.raises(PromptTooLong):
        await tokenizer.encode_text("a" * (longest * 4 + 1), max_tokens=4)


async def test_the_tokenizers_special_tokens_are_added_to_a_chat_on_request() -> None:
    stored = tiny_tokenizer()
    begin = stored.token_to_id("<|endoftext|>")
    stored.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair=None, special_tokens=[("<|endoftext|>", begin)]
    )
    tokenizer = ModelTokenizer(stored, None, ChatTemplate("{{ messages[0].content }}<|im_end|>", {}), ())
    for content in ("hello", "a<|im_end|>b"):
        chat = TemplateChat([{"role": "user", "content": content}])
        token_ids = await tokenizer.encode_chat(chat)
        assert begin not in token_ids
        assert await tokenizer.encode_chat(replace(chat, add_special_tokens=True)) == [begin, *token_ids]


async def test_truncation_and_padding_of_the_file_do_not_hold(model_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(2)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(await ModelTokenizer.load(tmp_path).encode_text("abcd")) == 4


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 1}, (2, 5)),
        ({"eos_token_id": 2}, {"eos_token_id": 1}, (2,)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": [1]}, (1,)),
        ({}, {"text_config": {"eos_token_id": [1, 5]}}, (1, 5)),
        (None, {"eos_token_id": 2, "text_config": {"eos_token_id": 1}}, (2,)),
        (None, {"eos_token_id": -1}, ()),
        ({"eos_token_id": [2, -1]}, {}, (2,)),
        (None, {}, ()),
    ],
)
def test_end_of_text_comes_from_the_generation_config_or_else_the_config(
    generation_config: dict[str, object] | None,
    config: dict[str, object],
    expected: tuple[int, ...],
    model_directory: Path,
    tmp_path: Path,
) -> None:
    shutil.copy(model_directory / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert ModelTokenizer.load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "no JSON"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", '{"chat_template": ["{{ messages }}"]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 5}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": ["default"], "template": "{{ messages }}"}]}'),
        pytest.param("tokenizer_config.json", json.dumps({"chat_template": NESTED_LOOPS}), id="nested loops"),
        pytest.param("tokenizer_config.json", "[" * 100_000, id="deep"),
        ("generation_config.json", "["),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("generation_config.json", '{"eos_token_id": [null]}'),
        ("generation_config.json", '{"eos_token_id": true}'),
        ("generation_config.json", '{"eos_token_id": [2, 4294967296]}'),
    ],
)
def test_the_error_of_invalid_files_names_the_directory(
    name: str, content: str | None, model_directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidModelFiles, match=str(tmp_path)):
        ModelTokenizer.load(tmp_path)


@pytest.mark.parametrize("charsmap", [b"", b"\0" * 4, b"\xff" * 9])
def test_a_tokenizer_with_a_damaged_table_of_characters_is_refused(
    charsmap: bytes, model_directory: Path, tmp_path: Path
) -> None:
    """tokenizers panics, which is no Exception: as it reads the file, or with the first text."""
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    parts = json.loads((tmp_path / "tokenizer.json").read_text())
    parts["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": b64encode(charsmap).decode()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(InvalidModelFiles, match=rf"{tmp_path}/tokenizer\.json cannot be used: "):
        ModelTokenizer.load(tmp_path)


async def test_another_tokenizer_brings_its_template_and_leaves_the_models_end_of_text(
    model_directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stored = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    stored.add_tokens(["hello world"])
    stored.save(str(other / "tokenizer.json"))
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    loaded = ModelTokenizer.load(model_directory, other)
    assert len(await loaded.encode_text("hello world")) == 1
    assert len(await loaded.encode_chat(TemplateChat([{"role": "user", "content": "hello world"}]))) == 1
    assert loaded.eos_token_ids == ModelTokenizer.load(model_directory).eos_token_ids


async def test_a_chat_is_rendered_by_the_template_of_the_settings(model_directory: Path) -> None:
    loaded = ModelTokenizer.load(model_directory, chat_template="{{ messages[0].content }}{{ eos_token }}")
    token_ids = await loaded.encode_chat(TemplateChat([{"role": "user", "content": "hello"}]))
    assert await loaded.decode(token_ids, SpecialTokens.KEPT) == "hello<|im_end|>"


async def encoded(tokenizer: ModelTokenizer, *texts: TextToEncode) -> list[list[int]]:
    return [token_ids async for token_ids in tokenizer.encode_texts(texts)]


@pytest.fixture(params=[template_processor, bert_processor])
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTokenizer:
    """A tokenizer as in BERT, read from its files."""
    return ModelTokenizer.load(make_encoder_directory(tmp_path, encoder_tokenizer(request.param())))


async def test_a_tokenizer_without_a_template_and_an_end_of_text_is_read(encoder: ModelTokenizer) -> None:
    assert encoder.chat_template is None
    assert encoder.eos_token_ids == ()
    assert encoder.num_special_tokens == 2
    token_ids = await encoder.encode_text("Hello  worlds")
    assert token_ids == ids("[CLS] hello world ##s [SEP]")
    assert await encoder.decode(token_ids, SpecialTokens.HIDDEN) == "hello worlds"
    assert encoder.vocabulary.text(ids("world ##s [SEP]")) == " worlds [SEP]"


@pytest.mark.parametrize(
    ("num_kept", "side", "kept"),
    [
        (3, TruncationSide.RIGHT, "[CLS] a [SEP]"),
        (3, TruncationSide.LEFT, "[CLS] d [SEP]"),
        (5, TruncationSide.RIGHT, "[CLS] a b c [SEP]"),
        (5, TruncationSide.LEFT, "[CLS] b c d [SEP]"),
        (6, TruncationSide.RIGHT, "[CLS] a b c d [SEP]"),
        (16, TruncationSide.LEFT, "[CLS] a b c d [SEP]"),
    ],
)
async def test_a_truncated_text_keeps_the_special_tokens_around_it(
    num_kept: int, side: TruncationSide, kept: str, encoder: ModelTokenizer
) -> None:
    assert await encoded(encoder, TextToEncode("a b c d", num_kept=num_kept, side=side)) == [ids(kept)]


async def test_a_text_without_added_tokens_is_truncated_to_as_many(encoder: ModelTokenizer) -> None:
    for side, kept in ((TruncationSide.RIGHT, "a b c"), (TruncationSide.LEFT, "b c d")):
        text = TextToEncode("a b c d", add_special_tokens=False, num_kept=3, side=side)
        assert await encoded(encoder, text) == [ids(kept)]


@pytest.mark.parametrize("num_texts", [1, 17, 3000])
async def test_the_tokens_of_many_texts_are_in_their_order(num_texts: int, encoder: ModelTokenizer) -> None:
    texts = ["a b", "c", "", "hello worlds " * 40, "d a"]
    chosen = [texts[number % 5] for number in range(num_texts)]
    expected = {text: await encoder.encode_text(text) for text in texts}
    assert await encoded(encoder, *map(TextToEncode, chosen)) == [expected[text] for text in chosen]


async def test_texts_that_nobody_asks_for_are_not_tokenized(
    encoder: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ModelTokenizer._encode
    texts: list[str] = []

    def counted(self: ModelTokenizer, one: TextToEncode) -> list[int]:
        texts.append(one.text)
        return encode(self, one)

    monkeypatch.setattr(ModelTokenizer, "_encode", counted)
    async with aclosing(encoder.encode_texts([TextToEncode("a " * 5_000)] * 100)) as found:
        assert len(await anext(found)) == 5_002
    assert 1 <= len(texts) < 10


def test_the_length_of_a_text_bounds_its_tokens_from_below(encoder: ModelTokenizer) -> None:
    longest = len("[MASK]")
    assert encoder.may_have("a" * 4 * longest, 4)
    assert not encoder.may_have("a" * (4 * longest + 1), 4)
