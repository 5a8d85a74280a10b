"""docs/parameters.md has every field of vLLM's SamplingParams and of requests, with tests that send it."""

import json
import re
from collections.abc import Iterator, Mapping, Set
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams

from docs.tools.from_vllm import SAMPLING_PARAMS
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.classifying.models import ClassifyBody
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
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody
from tests.clients.table import CLIENTS, HERE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parameters.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
REFUSED = "test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing"
OLLAMA = {*OllamaChatBody.model_fields, *OllamaGenerateBody.model_fields, *OllamaOptions.model_fields}
OF_CLIENTS: Mapping[str, Any] = json.loads((HERE / "programs" / "request_fields.json").read_text())
"""The fields of requests in the types of other packages, which `make clients` compares with them."""
ANTHROPIC_TYPES = ("MessageCreateParams", "MessageCountTokensParams", "BetaMessageCreateParams")
OLLAMA_TYPES: dict[str, type[BodyModel]] = {
    "ChatRequest": OllamaChatBody,
    "GenerateRequest": OllamaGenerateBody,
    "Options": OllamaOptions,
}
OLLAMA_EMBEDDING_TYPES: dict[str, type[BodyModel]] = {
    "EmbedRequest": OllamaEmbedBody,
    "EmbeddingsRequest": OllamaEmbeddingsBody,
}


def rows(page: str = PAGE) -> Iterator[tuple[list[str], list[str]]]:
    """Of each row of the tables: the fields in its first column, and the tests in its last one."""
    for line in page.splitlines():
        if line.startswith("| `"):
            first, *_, last = line.strip("|").split(" | ")
            yield re.findall(r"`(\w+)`", first), re.findall(r"`(tests/[^`]+)`", last)


def fields_of(*sections: str) -> set[str]:
    return {field for name in sections for fields, _ in rows(SECTIONS[name]) for field in fields}


def of_client(name: str, *types: str) -> set[str]:
    return {field for kind in types for field in OF_CLIENTS[name]["types"][kind]}


OPENAI = ("vLLM's SamplingParams", "OpenAI's completions and chat completions", "Further fields")
GROUPS = (OPENAI, *((name,) for name in SECTIONS if name not in OPENAI))
"""Sections about the fields of the same body: a test of a field may be in any of its rows."""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (OPENAI[:1], SAMPLING_PARAMS.keys()),
        (OPENAI[:2], get_type_hints(ChatParams).keys()),
        (OPENAI[:2], get_type_hints(CompletionParams).keys()),
        (["OpenAI's responses"], get_type_hints(ResponseParams).keys() | ResponsesBody.model_fields.keys()),
        (["OpenAI's embeddings"], get_type_hints(EmbeddingCreateParams).keys() | EmbeddingsBody.model_fields.keys()),
        (["Anthropic's messages"], MessagesBody.model_fields.keys() | of_client("anthropic", *ANTHROPIC_TYPES)),
        (
            ["Ollama's chat and generate"],
            OLLAMA
            | OllamaOptions.unserved.keys()
            | OllamaOptions.without_effect.keys()
            | of_client("ollama", *OLLAMA_TYPES),
        ),
        (
            ["Ollama's embed and embeddings"],
            OllamaEmbedBody.model_fields.keys()
            | OllamaEmbeddingsBody.model_fields
            | of_client("ollama", *OLLAMA_EMBEDDING_TYPES),
        ),
        (["Classifications"], ClassifyBody.model_fields.keys()),
        (["Scores and reranking"], ScoreBody.model_fields.keys() | RerankBody.model_fields),
    ],
    ids=[
        "vLLM",
        "chats",
        "completions",
        "responses",
        "embeddings",
        "Anthropic",
        "Ollama",
        "Ollama's embeddings",
        "classifications",
        "scores",
    ],
)
def test_every_field_has_a_row(sections: list[str], expected: Set[str]) -> None:
    assert expected - fields_of(*sections) == set()


@pytest.mark.parametrize("client", OF_CLIENTS)
def test_the_fields_of_other_packages_are_of_the_version_that_is_tested(client: str) -> None:
    """After a change of a version, `make clients ONLY=NAME` prints what differs."""
    (tested,) = (one.version for one in CLIENTS if one.name == client)
    assert OF_CLIENTS[client]["version"] == tested


def test_the_fields_of_other_packages_are_known() -> None:
    """None of them is ignored as an unknown field is."""
    assert of_client("vllm", "SamplingParams") == SAMPLING_PARAMS.keys()
    assert of_client("anthropic", *ANTHROPIC_TYPES) <= MessagesBody.known_fields()
    for kind, body in {**OLLAMA_TYPES, **OLLAMA_EMBEDDING_TYPES}.items():
        assert of_client("ollama", kind) <= body.known_fields(), kind


def sends(test: str, field: str) -> bool:
    """Whether a test's file names a field, or the test is parametrized by names of which the field is one."""
    path, _, name = test.partition("::")
    if re.search(rf"\b{field}\b", (ROOT / path).read_text()):
        return True
    function = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    marks = (mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize")
    values = (value for mark in marks for value in mark.args[1])
    return any(field in value if isinstance(value, tuple) else field == value for value in values)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[-1])
def test_every_field_is_sent_by_a_test_of_its_rows(group: tuple[str, ...]) -> None:
    tests: dict[str, set[str]] = {}
    for name in group:
        for fields, named in rows(SECTIONS[name]):
            for field in fields:
                tests.setdefault(field, set()).update(named)
    assert [field for field, named in tests.items() if not any(sends(test, field) for test in named)] == []


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
