"""The model's tokenizer."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway_svc.chat_template import TemplateChat
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer, PromptTooLong
from gateway_svc.validated_request import SpecialTokens


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
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("generation_config.json", "["),
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
