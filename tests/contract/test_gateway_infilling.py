"""A text that fills a gap, over the routes that have a suffix, with a scripted scheduler."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from gateway_harness import Harness, running_gateway
from official_client import official_client
from scripted_scheduler import answer_with
from tiny_model import make_model_directory, tiny_tokenizer

TOKENS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
FIRST = tiny_tokenizer().get_vocab_size()  # the id of the first one
PREFIX, MIDDLE, SUFFIX, PAD = range(FIRST, FIRST + len(TOKENS))


@pytest.fixture
async def filling(tmp_path: Path) -> AsyncIterator[Harness]:
    """A gateway for a model that fills gaps. It answers `world`, and that the file ends."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in TOKENS])
    async with running_gateway(make_model_directory(tmp_path / "tiny", tokenizer)) as quire:
        quire.scheduler.script = answer_with(tiny_tokenizer().encode(" world").ids, stop_token_id=PAD)
        yield quire


async def test_a_completion_fills_a_gap(filling: Harness) -> None:
    async with official_client(filling) as client:
        answer = await client.completions.create(model="tiny", prompt="hello", suffix="!", temperature=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (" world", "stop")
    submit = await filling.scheduler.next("submit")
    hello, end = (tiny_tokenizer().encode(text).ids for text in ("hello", "!"))
    assert list(submit.prompt_token_ids) == [PREFIX, *hello, SUFFIX, *end, MIDDLE]
    assert PAD in submit.stop_token_ids


@pytest.mark.parametrize(
    ("prompt", "expected"), [("hello", [PREFIX, *tiny_tokenizer().encode("hello").ids]), ("", [PREFIX])]
)
async def test_ollamas_prompt_fills_a_gap(filling: Harness, prompt: str, expected: list[int]) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "suffix": "!", "stream": False}
    answer = (await filling.http.post("/api/generate", json=body)).json()
    assert (answer["response"], answer["done_reason"]) == (" world", "stop")
    submit = await filling.scheduler.next("submit")
    shown = (await filling.http.post("/api/show", json={"model": "tiny"})).json()
    assert "insert" in shown["capabilities"]
    assert list(submit.prompt_token_ids) == [*expected, SUFFIX, *tiny_tokenizer().encode("!").ids, MIDDLE]
