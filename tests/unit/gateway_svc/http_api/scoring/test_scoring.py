"""Bodies and answers of /score and /rerank."""

from typing import Any

import pytest

from gateway_svc.embeddings import Normalization
from gateway_svc.field_paths import Field
from gateway_svc.http_api.scoring.models import RerankBody, ScoreBody
from gateway_svc.http_api.scoring.requests import RerankRequest, read_rerank, read_score
from gateway_svc.http_api.scoring.routes import rerank_answer, score_answer
from gateway_svc.output import Usage
from gateway_svc.retention import NONE
from gateway_svc.scores import UnvalidatedScores
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import TruncationSide
from gateway_svc.value_inputs import MAX_TEXT_TOKENS, ValueInput
from svc_common.errors import QuireError, Reason


def score(**fields: Any) -> UnvalidatedScores:
    return read_score(ScoreBody.of(fields))


def rerank(**fields: Any) -> RerankRequest:
    return read_rerank(RerankBody.of({"query": "a", "documents": ["b", "c"]} | fields))


def results(answer_id: str, read: RerankRequest, scores: list[float]) -> dict[str, Any]:
    answer = rerank_answer(answer_id, read, scores, "m", Usage(7))
    assert isinstance(answer, dict)
    return answer


def texts(inputs: Any) -> list[str]:
    return [one.prompt.text for one in inputs if isinstance(one.prompt, TextPrompt)]


@pytest.mark.parametrize("names", ["queries documents", "queries items", "text_1 text_2", "data_1 data_2"])
def test_both_sides_of_pairs_have_several_names(names: str) -> None:
    first, second = names.split()
    for one, other, pairs, fields in (
        ("a", "b", [(0, 1)], [first, second]),
        ("a", ["b", "c"], [(0, 1), (0, 2)], [first, f"{second}[0]", f"{second}[1]"]),
        (["a"], ["b", "c"], [(0, 1), (0, 2)], [f"{first}[0]", f"{second}[0]", f"{second}[1]"]),
        (["a", "b"], ["c", "d"], [(0, 2), (1, 3)], [f"{first}[0]", f"{first}[1]", f"{second}[0]", f"{second}[1]"]),
        ({"text": "a"}, ["b", {"text": "c"}], [(0, 1), (0, 2)], [f"{first}.text", f"{second}[0]", f"{second}[1].text"]),
    ):
        read = score(**{first: one, second: other})
        assert read.pairs.pairs == pairs
        assert texts(read.pairs.inputs) == list("abcd"[: len(fields)])
        assert [one.field_path(Field.TEXT) for one in read.pairs.inputs] == fields


def test_options_are_those_of_embeddings() -> None:
    fields: dict[str, Any] = {
        "model": "m", "truncate_prompt_tokens": 9, "truncation_side": "left", "priority": 3, "retention": "none",
        "max_tokens_per_query": 5, "max_tokens_per_doc": 7, "use_activation": True, "normalize": False, "user": "me",
    }  # fmt: skip
    for unvalidated in (
        score(text_1="a", text_2="b", **fields).embeddings,
        rerank(documents=["b"], **fields).unvalidated.embeddings,
    ):
        assert (unvalidated.model, unvalidated.priority, unvalidated.retention) == ("m", 3, NONE)
        assert (unvalidated.truncate_prompt_tokens, unvalidated.truncation_side) == (9, TruncationSide.LEFT)
        assert (unvalidated.normalization, unvalidated.dimensions) == (Normalization.OF_MODEL, None)
        query, document = unvalidated.inputs
        assert (query.max_text_tokens, document.max_text_tokens) == (5, 7)
        assert query.field_path(MAX_TEXT_TOKENS) == "max_tokens_per_query"
        assert document.field_path(MAX_TEXT_TOKENS) == "max_tokens_per_doc"


@pytest.mark.parametrize(
    ("fields", "is_raw"),
    [
        ({}, False),
        ({"use_activation": True}, False),
        ({"use_activation": False}, True),
        ({"raw_scores": True}, True),
        ({"raw_scores": False}, False),
        ({"raw_scores": True, "use_activation": False}, True),
    ],
)
def test_the_activation_has_two_names(fields: dict[str, Any], is_raw: bool) -> None:
    assert score(text_1="a", text_2="b", **fields).is_raw is is_raw
    assert rerank(**fields).unvalidated.is_raw is is_raw


def test_a_limit_of_zero_is_none() -> None:
    inputs: list[ValueInput] = [
        *score(text_1="a", text_2="b", max_tokens_per_doc=0, max_tokens_per_query=0).pairs.inputs,
        *rerank(max_tokens_per_doc=0, max_tokens_per_query=0).unvalidated.pairs.inputs,
    ]
    assert {one.max_text_tokens for one in inputs} == {None}


def test_a_query_is_compared_with_all_documents() -> None:
    read = rerank(query={"text": "a"}, documents=["b", {"text": "a", "title": "c"}])
    assert read.unvalidated.pairs.pairs == [(0, 1), (0, 0)]
    assert texts(read.unvalidated.pairs.inputs) == ["a", "b"]
    assert (read.texts, read.top_n) == (["b", "a"], None)
    assert rerank(documents="b").unvalidated.pairs.pairs == [(0, 1)]


def test_scores_are_in_the_order_of_the_pairs() -> None:
    assert score_answer("score-1", 12, [0.5, -1.0], "m", Usage(7, cached_tokens=2)) == {
        "id": "score-1",
        "object": "list",
        "created": 12,
        "model": "m",
        "data": [{"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": -1.0}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_documents_are_sorted_by_their_scores() -> None:
    read = rerank(documents=["b", "c", "d", "e"])
    answer = results("rerank-1", read, [0.1, 0.9, 0.1, 0.5])
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert (answer["id"], answer["model"]) == ("rerank-1", "m")
    assert answer["results"][0] == {"index": 1, "document": {"text": "c"}, "relevance_score": 0.9}
    assert [one["index"] for one in answer["results"]] == [1, 3, 0, 2]  # of equal ones the first


@pytest.mark.parametrize(("top_n", "indices"), [(None, [1, 0]), (0, [1, 0]), (1, [1]), (2, [1, 0]), (9, [1, 0])])
def test_the_answer_has_so_many_documents(top_n: int | None, indices: list[int]) -> None:
    answer = results("r", rerank(top_n=top_n), [0.1, 0.9])
    assert [one["index"] for one in answer["results"]] == indices


def test_texts_are_answered_as_tei_does() -> None:
    read = rerank(documents=None, texts=["b", {"text": "c"}, "d"], top_n=2)
    assert [one.field_path(Field.TEXT) for one in read.unvalidated.pairs.inputs[1:]] == [
        "texts[0]",
        "texts[1].text",
        "texts[2]",
    ]
    scores = [0.1, 0.9, 0.5]
    assert rerank_answer("r", read, scores, "m", Usage(7)) == [{"index": 1, "score": 0.9}, {"index": 2, "score": 0.5}]
    with_texts = rerank(documents=None, texts=["b", "c", "d"], top_n=1, return_text=True)
    assert rerank_answer("r", with_texts, scores, "m", Usage(7)) == [{"index": 1, "score": 0.9, "text": "c"}]
    with pytest.raises(QuireError) as error:
        rerank(texts=["b"])
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "texts")


@pytest.mark.parametrize("name", ["instruction", "instruct"])
def test_the_instruction_has_two_names(name: str) -> None:
    for unvalidated in (score(text_1="a", text_2="b", **{name: "Find."}), rerank(**{name: "Find."}).unvalidated):
        assert unvalidated.instruction == "Find."
        assert unvalidated.field_path(Field.INSTRUCTION) == name
    with pytest.raises(QuireError) as error:
        rerank(instruction="a", instruct="a")
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "instruct")


def test_documents_are_left_out_of_the_answer_on_request() -> None:
    answer = results("r", rerank(return_documents=False), [0.1, 0.9])
    assert answer["results"][0] == {"index": 1, "relevance_score": 0.9}


def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing() -> None:
    both: dict[str, Any] = {
        "input": "a", "messages": [], "prompt": "a", "dimensions": 2, "pooling": "cls", "encoding_format": "float",
        "add_special_tokens": False, "padding": "max_length", "request_id": "a",
        "chat_template_kwargs": {"a": 1}, "chat_template": "a", "mm_processor_kwargs": {"a": 1}, "cache_salt": "a",
        "truncate": True, "return_embeddings": True, "activation": False, "softmax": False,
        "input_type": "query", "truncation": True, "stream": True, "temperature": 0.5,
    }  # fmt: skip
    only_score: dict[str, Any] = {
        "query": "a",
        "texts": ["a"],
        "return_text": True,
        "top_n": 1,
        "return_documents": True,
        "label_token_ids": [1],
        "apply_softmax": True,
    }
    only_rerank: dict[str, Any] = {
        "queries": "a",
        "text_1": "a",
        "items": ["a"],
        "max_chunks_per_doc": 2,
        "rank_fields": ["title"],
    }
    pair: dict[str, Any] = {"text_1": "a", "text_2": "b"}
    refused: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (score, pair, both | only_score),
        (rerank, {}, both | only_rerank),
    ]
    for read, body, unserved in refused:
        for name, value in unserved.items():
            with pytest.raises(QuireError) as error:
                read(**(body | {name: value}))
            assert (error.value.reason, error.value.field) == (Reason.FEATURE_UNSUPPORTED, name)
    neutral: dict[str, Any] = {
        "add_special_tokens": True, "padding": "do_not_pad", "truncate": False, "return_embeddings": False,
        "return_text": False, "user": "me", "messages": None, "stream": False,
    }  # fmt: skip
    score(**pair, **neutral, top_n=0, apply_softmax=False)
    rerank(**neutral, rank_fields=["text"])


@pytest.mark.parametrize(
    ("read", "fields", "reason", "field"),
    [
        (score, {}, Reason.INVALID_FIELD, "queries"),
        (score, {"queries": "a"}, Reason.INVALID_FIELD, "documents"),
        (score, {"items": "a"}, Reason.INVALID_FIELD, "queries"),
        (score, {"text_1": "a"}, Reason.INVALID_FIELD, "text_2"),
        (score, {"data_2": ["a"]}, Reason.INVALID_FIELD, "data_1"),
        (score, {"text_1": "a", "text_2": "b", "documents": "b"}, Reason.INVALID_FIELD, "documents"),
        (score, {"queries": "a", "items": "b", "documents": "b"}, Reason.INVALID_FIELD, "items"),
        (score, {"text_1": ["a", "b"], "text_2": ["a"]}, Reason.INVALID_FIELD, "text_1"),
        (score, {"text_1": [], "text_2": ["a"]}, Reason.INVALID_FIELD, "text_1"),
        (score, {"text_1": "a", "text_2": []}, Reason.INVALID_FIELD, "text_2"),
        (score, {"text_1": "a", "text_2": ["a"] * 1_025}, Reason.INVALID_FIELD, "text_2"),
        (score, {"text_1": "a", "text_2": ["a", 5]}, Reason.INVALID_FIELD, "text_2[1]"),
        (score, {"text_1": [[5]], "text_2": "a"}, Reason.INVALID_FIELD, "text_1[0]"),
        (score, {"text_1": {"content": []}, "text_2": "a"}, Reason.FEATURE_UNSUPPORTED, "text_1.content"),
        (rerank, {"query": None}, Reason.INVALID_FIELD, "query"),
        (rerank, {"query": ["a"]}, Reason.INVALID_FIELD, "query"),
        (rerank, {"query": {}}, Reason.INVALID_FIELD, "query.text"),
        (rerank, {"documents": None}, Reason.INVALID_FIELD, "documents"),
        (rerank, {"documents": 1}, Reason.INVALID_FIELD, "documents"),
        (rerank, {"documents": []}, Reason.INVALID_FIELD, "documents"),
        (rerank, {"documents": ["a", None]}, Reason.INVALID_FIELD, "documents[1]"),
        (rerank, {"documents": ["a", {"title": "b"}]}, Reason.INVALID_FIELD, "documents[1].text"),
        (rerank, {"documents": ["a", {"text": 1}]}, Reason.INVALID_FIELD, "documents[1].text"),
        (rerank, {"documents": [{"image": "a"}]}, Reason.FEATURE_UNSUPPORTED, "documents[0].image"),
        (rerank, {"top_n": -1}, Reason.INVALID_FIELD, "top_n"),
        (rerank, {"return_documents": 1}, Reason.INVALID_FIELD, "return_documents"),
        (rerank, {"use_activation": True, "raw_scores": True}, Reason.INVALID_FIELD, "raw_scores"),
        (rerank, {"use_activation": False, "raw_scores": False}, Reason.INVALID_FIELD, "raw_scores"),
    ],
)
def test_other_bodies_are_refused_by_the_field(read: Any, fields: Any, reason: Reason, field: str) -> None:
    with pytest.raises(QuireError) as error:
        read(**fields)
    assert (error.value.reason, error.value.field) == (reason, field)
