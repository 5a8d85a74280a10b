"""Calls for classifications: conversion of Python values to requests, and of answers to values."""

import asyncio
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client import AsyncClient, ClassifyOptions, Client
from quire_client.classify_requests import classify_request

EVERY_OPTION: ClassifyOptions = {
    "model": "tiny",
    "truncate_prompt_tokens": -1,
    "truncation_side": "left",
    "add_special_tokens": False,
    "raw_scores": True,
    "priority": -2,
    "retention": 60,
    "timeout": 5.0,
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}


def test_every_option_has_its_field() -> None:
    assert EVERY_OPTION.keys() == ClassifyOptions.__annotations__.keys()
    inputs: list[str | list[int]] = ["a", [1, 2]]
    request = classify_request(inputs, EVERY_OPTION)
    assert MessageToDict(request, preserving_proto_field_name=True) == {
        "inputs": [{"text": "a"}, {"token_ids": {"ids": [1, 2]}}],
        "model": "tiny",
        "truncate_prompt_tokens": -1,
        "truncation_side": "TRUNCATION_SIDE_LEFT",
        "add_special_tokens": False,
        "raw_scores": True,
        "priority": -2,
        "retention": {"seconds": 60},
    }
    assert {field.name for field in pb.ClassifyRequest.DESCRIPTOR.fields} == {
        name for name in (*EVERY_OPTION, "inputs") if name not in ("timeout", "traceparent")
    }


def test_one_input_needs_no_list_and_none_is_absent() -> None:
    absent: Any = dict.fromkeys(EVERY_OPTION)
    assert classify_request("a", absent) == pb.ClassifyRequest(inputs=[pb.EmbedInput(text="a")])


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ("a", {"raw_score": True}, "there is no option raw_score; did you mean raw_scores?"),
        ("a", {"dimensions": 8}, "there is no option dimensions"),
        ({"a": 1}, {}, "inputs must be a text, token ids or a list of these"),
    ],
)
def test_what_does_not_exist_is_refused(inputs: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        classify_request(inputs, options)


async def test_numbers_come_in_the_order_of_the_inputs(address: str, service: Any) -> None:
    async with AsyncClient(address) as client:
        found = await client.classify(["a", "b"], raw_scores=True, timeout=30)
    assert (found.model, found.labels, found.usage.prompt_tokens) == ("tiny", ("no", "yes"), 4)
    assert (found.scores, found.top_labels) == (((0.25, 0.5), (0.75, 0.5)), ("yes", "no"))
    (request,) = service.requests
    assert ([one.text for one in request.inputs], request.raw_scores) == (["a", "b"], True)


async def test_the_blocking_client_classifies(address: str) -> None:
    def classify() -> tuple[str, ...]:
        with Client(address) as client:
            return client.classify([1, 2]).top_labels

    assert await asyncio.to_thread(classify) == ("yes",)
