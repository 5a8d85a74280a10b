"""Calls for embeddings: conversion of Python values to requests, and of answers to values."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, EmbedOptions, QuireError
from quire_client.embed_requests import Inputs, embed_request

WITH_BAD_ID: list[str | Sequence[int]] = ["a", [-1]]
TEXT_AND_IDS: list[str | Sequence[int]] = ["a", [4, 5]]
EVERY_OPTION: EmbedOptions = {
    "model": "tiny",
    "dimensions": 8,
    "pooling": "last",
    "normalize": False,
    "truncate_prompt_tokens": -1,
    "truncation_side": "left",
    "add_special_tokens": False,
    "priority": -2,
    "retention": 60,
    "timeout": 5.0,
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}


def test_every_option_has_its_field() -> None:
    assert EVERY_OPTION.keys() == EmbedOptions.__annotations__.keys()
    assert MessageToDict(embed_request("a", EVERY_OPTION), preserving_proto_field_name=True) == {
        "inputs": [{"text": "a"}],
        "model": "tiny",
        "dimensions": 8,
        "pooling": "POOLING_LAST",
        "normalize": False,
        "truncate_prompt_tokens": -1,
        "truncation_side": "TRUNCATION_SIDE_LEFT",
        "add_special_tokens": False,
        "priority": -2,
        "retention": {"seconds": 60},
    }


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("a", [{"text": "a"}]),
        ([4, 5], [{"token_ids": {"ids": [4, 5]}}]),
        (["a", [4]], [{"text": "a"}, {"token_ids": {"ids": [4]}}]),
        ([[4], [5]], [{"token_ids": {"ids": [4]}}, {"token_ids": {"ids": [5]}}]),
        (["a", []], [{"text": "a"}, {"token_ids": {}}]),
        ([], []),
    ],
)
def test_one_input_needs_no_list(inputs: Inputs, expected: list[dict[str, Any]]) -> None:
    assert embed_request(inputs, {}) == pb.EmbedRequest(inputs=expected)


def test_none_is_absent() -> None:
    absent: Any = dict.fromkeys(EVERY_OPTION)
    assert embed_request("a", absent) == pb.EmbedRequest(inputs=[{"text": "a"}])


def test_retentions() -> None:
    assert embed_request("a", {"retention": "none"}).retention.WhichOneof("kind") == "none"
    assert embed_request("a", {"retention": "until_end"}).retention.WhichOneof("kind") == "until_end"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poling": "cls"}, "there is no option poling; did you mean pooling?"),
        ({"temperature": 1}, "there is no option temperature"),
        ({"pooling": "max"}, "pooling is"),
        ({"truncation_side": "middle"}, "truncation_side is"),
        ({"retention": "always"}, "retention is"),
        ({"dimensions": "8"}, "dimensions cannot be a str"),
    ],
)
def test_options_that_do_not_exist_are_refused(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        embed_request("a", options)


def test_a_value_that_does_not_fit_is_refused_by_the_servers_name() -> None:
    with pytest.raises(QuireError) as error:
        embed_request(WITH_BAD_ID, {})
    assert error.value.field == "inputs[1].token_ids.ids"


async def test_vectors_come_in_the_order_of_the_inputs(address: str, service: Any) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with AsyncClient(address) as client:
        found = await client.embed(TEXT_AND_IDS, pooling="mean", timeout=30, traceparent=traceparent)
    assert found.vectors == ((0.0, 0.5), (1.0, 0.5))
    assert (found.model, found.vector) == ("tiny", (0.0, 0.5))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.cached_tokens) == (4, 0, 1)
    (request,) = service.requests
    assert request.inputs[0].text == "a"
    assert service.metadata[0]["traceparent"] == traceparent
    assert 0 < service.time_remaining[0] <= 31  # gRPC rounds up


async def test_an_error_of_an_input_names_it(address: str, service: Any) -> None:
    field = "inputs[1].text"
    service.refuse_with_details(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "must not be empty", field)
    async with AsyncClient(address) as client:
        with pytest.raises(QuireError) as caught:
            await client.embed(["a", ""])
    assert (caught.value.reason, caught.value.field) == ("INVALID_FIELD", field)
    assert len(service.requests) == 1
