"""docs/parameters.md has every field of vLLM's SamplingParams and of requests, with tests that exist."""

import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams

from docs.tools.from_vllm import SAMPLING_PARAMS
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.ollama.models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parameters.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
REFUSED = "test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing"
OLLAMA = {*OllamaChatBody.model_fields, *OllamaGenerateBody.model_fields, *OllamaOptions.model_fields}


def rows(page: str = PAGE) -> Iterator[tuple[list[str], list[str]]]:
    """Of each row of the tables: the fields in its first column, and the tests in its last one."""
    for line in page.splitlines():
        if line.startswith("| `"):
            first, *_, last = line.strip("|").split(" | ")
            yield re.findall(r"`(\w+)`", first), re.findall(r"`(tests/[^`]+)`", last)


def fields_of(*sections: str) -> set[str]:
    return {field for name in sections for fields, _ in rows(SECTIONS[name]) for field in fields}


OPENAI = ("vLLM's SamplingParams", "OpenAI's completions and chat completions", "Further fields")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (OPENAI[:1], SAMPLING_PARAMS.keys()),
        (OPENAI[:2], get_type_hints(ChatParams).keys()),
        (OPENAI[:2], get_type_hints(CompletionParams).keys()),
        (["OpenAI's embeddings"], get_type_hints(EmbeddingCreateParams).keys() | EmbeddingsBody.model_fields.keys()),
        (["Anthropic's messages"], MessagesBody.model_fields.keys()),
        (
            ["Ollama's chat and generate"],
            OLLAMA | OllamaOptions.unserved.keys() | OllamaOptions.without_effect.keys(),
        ),
        (["Ollama's embed and embeddings"], OllamaEmbedBody.model_fields.keys() | OllamaEmbeddingsBody.model_fields),
        (["Scores and reranking"], ScoreBody.model_fields.keys() | RerankBody.model_fields),
    ],
    ids=["vLLM", "chats", "completions", "embeddings", "Anthropic", "Ollama", "Ollama's embeddings", "scores"],
)
def test_every_field_has_a_row(sections: list[str], expected: Set[str]) -> None:
    assert expected - fields_of(*sections) == set()


def test_the_tests_exist() -> None:
    named = {test for _, tests in rows() for test in tests}
    assert len(named) > 70
    for test in named:
        path, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


@pytest.mark.parametrize("body", [CompletionBody, ChatBody], ids=["completions", "chats"])
def test_fields_that_are_not_served_are_said_to_be_refused(body: type[CompletionBody | ChatBody]) -> None:
    page = "\n".join(SECTIONS[name] for name in OPENAI)
    refused = {field for fields, tests in rows(page) if any(REFUSED in test for test in tests) for field in fields}
    for field in fields_of(*OPENAI) & body.unserved.keys():
        assert field in refused, field
    unserved = CompletionBody.unserved.keys() | ChatBody.unserved.keys()
    assert not (refused & body.model_fields.keys()) - unserved  # one of them may serve it
