"""Bodies of routes that embed texts, with one bad field: status, code and the field's name as the body spells it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway_harness import Harness
from tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Path, and the body with a bad field; then code and field of the error.
Case = tuple[str, dict[str, Any], str, str]
BASES: dict[str, dict[str, Any]] = {
    "/score": {"queries": "hello", "documents": ["hello", "world"]},
    "/v2/rerank": {"query": "hello", "documents": ["hello", "world"]},
    "/v2/embed": {"texts": ["hello"]},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
}
SIMILARITY, OLLAMA = ("/score", "/v2/rerank"), ("/api/embed", "/api/embeddings")
INVALID, UNSUPPORTED, TOO_LONG, UNKNOWN = (
    "invalid_field",
    "feature_unsupported",
    "context_length_exceeded",
    "model_not_found",
)
STATUSES = {INVALID: 400, UNSUPPORTED: 400, TOO_LONG: 400, UNKNOWN: 404}
HALF, LONG = "\ud800", "a" * (CONTEXT_LENGTH + 1)

NOT_A: dict[str, list[Any]] = {
    "integer": ["1", False, 1.0, [1], {}],
    "flag": ["true", 0, 1, [], {}],
    "string": [1, True, [], {}],
    "object": ["{}", 1, True, []],
}
KINDS: list[tuple[str, tuple[str, ...], list[str]]] = [
    ("integer", SIMILARITY, ["max_tokens_per_query", "max_tokens_per_doc", "truncate_prompt_tokens", "priority"]),
    ("integer", ("/v2/rerank",), ["top_n"]),
    ("integer", ("/api/embed",), ["dimensions"]),
    ("integer", ("/v2/embed",), ["output_dimension", "max_tokens", "priority"]),
    ("flag", ("/v2/rerank",), ["return_documents", "return_text"]),
    ("flag", SIMILARITY, ["use_activation", "raw_scores"]),
    ("flag", OLLAMA, ["truncate"]),
    ("string", (*SIMILARITY, *OLLAMA, "/v2/embed"), ["model"]),
    ("string", SIMILARITY, ["instruction", "instruct"]),
    ("string", ("/api/embeddings",), ["prompt"]),
    ("object", OLLAMA, ["options"]),
]


def types() -> Iterator[Case]:
    """Values of a wrong type."""
    for kind, paths, names in KINDS:
        for path in paths:
            for name in names:
                for value in NOT_A[kind]:
                    yield path, {name: value}, INVALID, name


NO_TEXTS: list[Any] = [1, None, [], "", HALF, [5]]
NO_DOCUMENTS: list[Any] = [1, True, [], "", HALF, ["a"] * 1_025]
NO_INPUTS: list[Any] = [1, True, {}, HALF, ["a"] * 2_049]
NO_RETENTIONS: list[Any] = ["always", 0, True, [], 1.5]
NO_SIDES: list[Any] = ["none", 1, []]
NO_QUERIES: list[Any] = [1, [], "", HALF, None, ["a", "b", "c"]]
NO_QUERY: list[Any] = [1, [], ["a"], "", HALF, None]


def of_all() -> Iterator[Case]:
    """Of every route."""
    for path in BASES:
        yield path, {"model": "other"}, UNKNOWN, "model"
        yield path, {"modle": "tiny"}, INVALID, "modle"
        yield path, {"encoding_format": "base64"}, UNSUPPORTED, "encoding_format"
        yield path, {"messages": [{"role": "user", "content": "a"}]}, UNSUPPORTED, "messages"


def of_similarity() -> Iterator[Case]:
    """Texts and ranges of /score and /rerank."""
    for path in SIMILARITY:
        rows: list[tuple[dict[str, Any], str, str]] = [
            *(({"documents": value}, INVALID, "documents") for value in NO_DOCUMENTS),
            *(({"documents": ["a", value]}, INVALID, "documents[1]") for value in NO_TEXTS),
            *(({"documents": [{"text": value}]}, INVALID, "documents[0].text") for value in NO_TEXTS[:-1]),
            ({"documents": {}}, INVALID, "documents.text"), ({"documents": [{}]}, INVALID, "documents[0].text"),
            ({"documents": ["a", "a", "b", LONG]}, TOO_LONG, "documents[3]"),
            ({"documents": {"text": LONG}}, TOO_LONG, "documents.text"),
            ({"documents": ["a", "a" * 10**6], "truncate_prompt_tokens": -1}, TOO_LONG, "documents[1]"),
            *(({name: value}, INVALID, name) for name in ("max_tokens_per_query", "max_tokens_per_doc")
              for value in (-1, CONTEXT_LENGTH + 1, 2**63)),
            *(({"truncate_prompt_tokens": value}, INVALID, "truncate_prompt_tokens")
              for value in (0, -2, CONTEXT_LENGTH + 1)),
            *(({"priority": value}, INVALID, "priority") for value in (2**31, -(2**31) - 1)),
            *(({"retention": value}, INVALID, "retention") for value in NO_RETENTIONS),
            *(({"truncation_side": value}, INVALID, "truncation_side") for value in NO_SIDES),
            *(({name: value}, UNSUPPORTED, name) for name, value in {
                "instruction": "a", "input": "a", "dimensions": 5, "temperature": 1, "stream": True,
            }.items()),
        ]  # fmt: skip
        for fields, code, where in rows:
            yield path, fields, code, where


def of_one() -> Iterator[Case]:
    """Of one route."""
    rows: list[Case] = [
        *(("/score", {"queries": value}, INVALID, "queries") for value in NO_QUERIES),
        ("/score", {"queries": ["a", LONG]}, TOO_LONG, "queries[1]"),
        ("/score", {"documents": None}, INVALID, "documents"), ("/score", {"text_1": "a"}, INVALID, "text_1"),
        ("/score", {"items": "a"}, INVALID, "items"), ("/score", {"top_n": 1}, UNSUPPORTED, "top_n"),
        *(("/v2/rerank", {"query": value}, INVALID, "query") for value in NO_QUERY),
        ("/v2/rerank", {"query": {"text": LONG}}, TOO_LONG, "query.text"),
        ("/v2/rerank", {"documents": None}, INVALID, "documents"), ("/v2/rerank", {"top_n": -1}, INVALID, "top_n"),
        ("/v2/rerank", {"texts": ["a"]}, INVALID, "texts"),
        ("/v2/rerank", {"documents": None, "texts": ["a", LONG]}, TOO_LONG, "texts[1]"),
        ("/score", {"texts": ["a"]}, UNSUPPORTED, "texts"),
        *(("/v2/embed", {"texts": ["a", value]}, INVALID, "texts[1]") for value in NO_TEXTS),
        *(("/v2/embed", {"texts": value}, INVALID, "texts") for value in (None, [], ["a"] * 2_049)),
        ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}, TOO_LONG, "texts[1]"),
        ("/v2/embed", {"max_tokens": CONTEXT_LENGTH + 1}, INVALID, "max_tokens"),
        *(("/v2/embed", {"output_dimension": value}, INVALID, "output_dimension") for value in (0, -1, 65_537)),
        *(("/v2/embed", {"retention": value}, INVALID, "retention") for value in NO_RETENTIONS),
        ("/v2/embed", {"input": "a"}, UNSUPPORTED, "input"),
        ("/v2/rerank", {"rank_fields": ["title"]}, UNSUPPORTED, "rank_fields"),
        ("/v2/rerank", {"max_chunks_per_doc": 4}, UNSUPPORTED, "max_chunks_per_doc"),
        *(("/api/embed", {"input": value}, INVALID, "input") for value in NO_INPUTS),
        *(("/api/embed", {"input": ["a", value]}, INVALID, "input[1]") for value in NO_TEXTS[:-1]),
        ("/api/embed", {"input": ["a", LONG], "truncate": False}, TOO_LONG, "input[1]"),
        ("/api/embed", {"input": "a" * 10**6}, TOO_LONG, "input"),
        *(("/api/embed", {"dimensions": value}, INVALID, "dimensions") for value in (0, -1, 65_537)),
        ("/api/embed", {"prompt": "a"}, UNSUPPORTED, "prompt"),
        ("/api/embeddings", {"prompt": HALF}, INVALID, "prompt"),
        ("/api/embeddings", {"prompt": LONG, "truncate": False}, TOO_LONG, "prompt"),
        ("/api/embeddings", {"input": "a"}, UNSUPPORTED, "input"),
        ("/api/embeddings", {"dimensions": 5}, UNSUPPORTED, "dimensions"),
    ]  # fmt: skip
    yield from rows


CASES = [*types(), *of_all(), *of_similarity(), *of_one()]


def name_of(case: Case) -> str:
    path, body, _, _ = case
    return f"{path[1:]} {ascii(body)[:60]}"


async def test_there_are_many() -> None:
    assert len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_a_bad_field_is_named(case: Case, gateway: Harness) -> None:
    path, body, code, field = case
    content = json.dumps(BASES[path] | body)
    answer = await gateway.http.post(path, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == STATUSES[code]
    if path in OLLAMA:
        assert error.startswith(f"{field}: ")
    else:
        assert (error["code"], error["param"]) == (code, field)
    assert len(answer.content) < 1_000
