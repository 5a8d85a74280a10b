"""Calls for scores: conversion of Python values to requests, and of answers to values."""

from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, QuireError, ScoreOptions
from quire_client.score_requests import score_request

EVERY_OPTION: ScoreOptions = {
    "model": "tiny",
    "max_tokens_per_query": 5,
    "max_tokens_per_document": 7,
    "truncate_prompt_tokens": -1,
    "truncation_side": "left",
    "raw_scores": True,
    "priority": -2,
    "instruction": "Find.",
    "retention": 60,
    "timeout": 5.0,
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}


def test_every_option_has_its_field() -> None:
    assert EVERY_OPTION.keys() == ScoreOptions.__annotations__.keys()
    assert MessageToDict(score_request("a", ["b", "c"], EVERY_OPTION), preserving_proto_field_name=True) == {
        "queries": ["a"],
        "documents": ["b", "c"],
        "model": "tiny",
        "max_tokens_per_query": 5,
        "max_tokens_per_document": 7,
        "truncate_prompt_tokens": -1,
        "truncation_side": "TRUNCATION_SIDE_LEFT",
        "raw_scores": True,
        "priority": -2,
        "instruction": "Find.",
        "retention": {"seconds": 60},
    }


def test_one_text_needs_no_list_and_none_is_absent() -> None:
    absent: Any = dict.fromkeys(EVERY_OPTION)
    assert score_request("a", "b", absent) == pb.ScoreRequest(queries=["a"], documents=["b"])
    assert score_request(["a", "b"], ("c", "d"), {}) == pb.ScoreRequest(queries=["a", "b"], documents=["c", "d"])


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ("b", {"raw_score": True}, "there is no option raw_score; did you mean raw_scores?"),
        ("b", {"dimensions": 8}, "there is no option dimensions"),
        ("b", {"truncation_side": "middle"}, "truncation_side is"),
        ("b", {"max_tokens_per_query": "8"}, "max_tokens_per_query cannot be a str"),
        ([1], {}, "documents cannot be a list"),
    ],
)
def test_what_does_not_exist_is_refused(documents: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        score_request("a", documents, options)


async def test_scores_come_in_the_order_of_the_documents(address: str, service: Any) -> None:
    async with AsyncClient(address) as client:
        found = await client.score("a", ["b", "c"], raw_scores=True, timeout=30)
    assert (found.model, found.scores, found.usage.prompt_tokens) == ("tiny", (0.5, 1.5), 6)
    (request,) = service.requests
    assert (list(request.queries), list(request.documents), request.raw_scores) == (["a"], ["b", "c"], True)
    assert 0 < service.time_remaining[0] <= 31  # gRPC rounds up


async def test_an_error_of_a_document_names_it(address: str, service: Any) -> None:
    service.refuse_with_details(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "must not be empty", "documents[1]")
    async with AsyncClient(address) as client:
        with pytest.raises(QuireError) as caught:
            await client.score("a", ["b", ""])
    assert (caught.value.reason, caught.value.field) == ("INVALID_FIELD", "documents[1]")
