"""Prompts with a gap, for models whose tokenizers have tokens for the text around it."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from gateway_requests import MODEL, VOCAB_SIZE, over_http, refused
from gateway_svc.infilling import InfillForm
from gateway_svc.tokenizer import ModelTokenizer
from svc_common.errors import Reason
from tiny_model import EOS, tiny_tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
STARCODER = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
CODESTRAL = ["[PREFIX]", "[MIDDLE]", "[SUFFIX]"]
BEFORE, AFTER = "def he(", "):\n  ello"

# As the models' cards write them.
PROMPTS = [
    (QWEN, f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
    (STARCODER, f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
    (DEEPSEEK, f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>"),
    (CODESTRAL, f"[SUFFIX]{AFTER}[PREFIX]{BEFORE}"),
]


@pytest.fixture(autouse=True)
def model_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the size of its tokenizer."""
    monkeypatch.setattr("gateway_requests.MODEL", replace(MODEL, vocab_size=VOCAB_SIZE + len(QWEN)))


def with_tokens(added: list[str]) -> tuple[ModelTokenizer, Tokenizer]:
    """A model's tokenizer with these tokens, and the library's own."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in added])
    return ModelTokenizer(tokenizer, {"type": "ByteLevel"}, None, [EOS]), tokenizer


@pytest.mark.parametrize(("added", "prompt"), PROMPTS, ids=["qwen", "starcoder", "deepseek", "codestral"])
async def test_the_prompt_is_that_of_the_models_card(added: list[str], prompt: str) -> None:
    tokenizer, reference = with_tokens(added)
    valid = await over_http(tokenizer, prompt=BEFORE, suffix=AFTER, logprobs=1)
    assert list(valid.prompt_token_ids) == reference.encode(prompt).ids
    at_begin = await over_http(tokenizer, prompt="", suffix=AFTER)
    text = prompt.replace(BEFORE, "")
    assert list(at_begin.prompt_token_ids) == reference.encode(text).ids


async def test_other_tokens_of_files_end_the_answer_unless_their_end_is_ignored() -> None:
    tokenizer, reference = with_tokens(QWEN)
    ends = {EOS, *map(reference.token_to_id, QWEN)}
    valid = await over_http(tokenizer, prompt="a", suffix="b")
    assert set(valid.stopping.ending_token_ids) == ends
    ignored = await over_http(tokenizer, prompt="a", suffix="b", ignore_eos=True)
    assert ignored.stopping.ending_token_ids == ()
    for fields in ({}, {"suffix": None}, {"suffix": ""}):
        without = await over_http(tokenizer, prompt="a", **fields)
        assert without.stopping.ending_token_ids == (EOS,)
        assert list(without.prompt_token_ids) == reference.encode("a").ids


@pytest.mark.parametrize(
    ("fields", "reason", "name"),
    [
        ({"echo": True}, Reason.FEATURE_UNSUPPORTED, "suffix"),
        ({"truncate_prompt_tokens": 5}, Reason.FEATURE_UNSUPPORTED, "suffix"),
        ({"prompt": [5, 6]}, Reason.INVALID_FIELD, "suffix"),
        ({"prompt": None}, Reason.INVALID_FIELD, "prompt"),
        ({"suffix": "\ud800"}, Reason.INVALID_FIELD, "suffix"),
        ({"suffix": 5}, Reason.INVALID_FIELD, "suffix"),
        ({"suffix": "a" * 3000}, Reason.CONTEXT_LENGTH_EXCEEDED, "prompt"),
    ],
)
async def test_what_is_refused_with_a_suffix(fields: dict[str, Any], reason: Reason, name: str) -> None:
    tokenizer, _ = with_tokens(QWEN)
    assert await refused(over_http(tokenizer, **{"prompt": "a", "suffix": "b", **fields})) == (reason, name)


@pytest.mark.parametrize("added", [[], QWEN[:2], ["[PREFIX]"], ["<fim_prefix>", "<|fim_suffix|>", "<fim_middle>"]])
async def test_a_model_without_all_of_the_tokens_takes_no_suffix(added: list[str]) -> None:
    tokenizer, _ = with_tokens(added)
    asked = over_http(tokenizer, prompt="a", suffix="b")
    assert await refused(asked) == (Reason.FEATURE_UNSUPPORTED, "suffix")
    assert InfillForm.of(tokenizer.vocabulary.added) is None
