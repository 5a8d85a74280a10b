"""Constraints on the output over the wire: the grammar reaches the scheduler, and hostile ones hold up nobody."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from gateway_calls import asking, consumed
from gateway_harness import Harness, encoded
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from tiny_model import EOS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


def hostile(number: int) -> dict[str, Any]:
    """A schema that takes time and memory without end."""
    return {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(40 + number)]}


async def test_the_grammar_is_sent_to_the_scheduler(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded('{"a": 1}'), stop_token_id=EOS)

    response = await quire.http.post("/v1/completions", json={"prompt": "hello", "response_format": FORM})

    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == '{"a": 1}'
    assert '"required":["a"]' in (await quire.scheduler.next("submit")).sampling.grammar


async def test_a_request_without_a_constraint_has_no_grammar(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    await quire.http.post("/v1/completions", json={"prompt": "hello", "response_format": {"type": "text"}})

    assert (await quire.scheduler.next("submit")).sampling.grammar == ""
    # Nor is a process started for it.
    (model,) = quire.gateway._catalog
    assert model.grammars is not None
    assert model.grammars._process is None


async def test_a_constraint_is_a_part_of_the_request_under_its_name(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    digests = []
    for fields in ({"regex": "a"}, {"guided_regex": "a"}, {"regex": "b"}, {}):
        await quire.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9, **fields})
        digests.append((await quire.scheduler.next("submit")).body_digest)
    request = asking(constraint=api.Constraint(regex="a"), stopping=api.Stopping(max_tokens=9))
    await consumed(quire.stub.StreamGenerate(request))
    digests.append((await quire.scheduler.next("submit")).body_digest)

    assert digests[0] == digests[1] == digests[4]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_has_the_field_and_the_place(path: str, quire: Harness) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    schema: dict[str, Any] = {"properties": {"a": {"not": {}}}}
    response = await quire.http.post(path, json={**prompt, "structured_outputs": {"json": schema}})

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "grammar_invalid")
    assert error["param"] == "structured_outputs.json"
    assert "at #/properties/a/not: " in error["message"]


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type"),
    ({"items": {"minimum": "x"}}, "#/items/minimum"),
    ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "#/items/oneOf"),
    ({"items": {"pattern": "a("}}, "#/items/pattern"),
    ({"items": {"$ref": "#/nowhere"}}, "#/items/$ref"),
]


@pytest.mark.parametrize(("schema", "place"), PLACES)
async def test_both_protocols_name_the_place_in_a_schema(schema: dict[str, Any], place: str, quire: Harness) -> None:
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "json_schema": schema})
    assert response.json()["error"]["message"].startswith(f"json_schema: at {place}: ")

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await consumed(quire.stub.StreamGenerate(asking(constraint=api.Constraint(json_schema=json.dumps(schema)))))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"generation.constraint.json_schema: at {place}: " in str(raised.value.details())


async def test_both_protocols_name_the_line_of_an_undefined_rule(quire: Harness) -> None:
    grammar = 'root ::= a\na ::= "x" | b\n'
    response = await quire.http.post("/v1/completions", json={"prompt": "a", "grammar": grammar})
    assert "Rule 'b' not found at line 2, " in response.json()["error"]["message"]

    with pytest.raises(grpc.aio.AioRpcError, match="Rule 'b' not found at line 2, "):
        await consumed(quire.stub.StreamGenerate(asking(constraint=api.Constraint(gbnf=grammar))))


async def test_others_are_answered_while_hostile_constraints_are_checked(quire: Harness) -> None:
    quire.scheduler.script = answer_with(encoded("hello"), stop_token_id=EOS)
    await quire.http.post("/v1/completions", json={"prompt": "hello", "regex": "a"})
    checks = [
        asyncio.create_task(quire.http.post("/v1/completions", json={"prompt": "a", "json_schema": hostile(number)}))
        for number in range(4)
    ]
    num_answered = 0
    while not all(task.done() for task in checks):
        response = await quire.http.post("/v1/completions", json={"prompt": "hello"})
        assert response.status_code == 200
        num_answered += 1

    assert [task.result().json()["error"]["code"] for task in checks] == ["grammar_too_complex"] * 4
    # The checks take half a second of processor time in another process.
    assert num_answered >= 2
