"""Constraints on the output with the shallow model: every text that ended by itself is valid."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import jsonschema
import openai
import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, QuireError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"anyOf": [{"type": "string", "format": "email", "maxLength": 30}, {"type": "null"}]},
        "kind": {"enum": ["student", "teacher"]},
    },
    "required": ["name", "age", "email", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {"label": {"type": "string", "pattern": "^[a-z]{1,5}$"}},
            "required": ["label"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 3}},
    "required": ["leaves"],
    "additionalProperties": False,
}
RATING = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 5}},
    "required": ["score"],
    "additionalProperties": False,
}
RATINGS = {"type": "array", "items": RATING, "minItems": 1, "maxItems": 3}
SCHEMAS = {"person": PERSON, "tree": TREE, "ratings": RATINGS}
CHAT: list[Any] = [{"role": "user", "content": "Describe a person, and answer in JSON."}]
DATE = r"(Mon|Tues|Wednes)day, \d{1,2} (May|June) 20\d{2}"
MAX_TOKENS = 300
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def running(shallow_model: object) -> Iterator[Deployment]:
    with deployment(gateways=2) as started:
        yield started


@pytest.fixture
async def client(running: Deployment) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.grpc) as client:
        yield client


@pytest.fixture
async def official(running: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.DefaultAsyncHttpxClient(trust_env=False, timeout=600) as http:
        yield openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", http_client=http, max_retries=0)


@pytest.mark.parametrize("name", SCHEMAS)
async def test_texts_that_ended_are_valid_under_the_schema(name: str, official: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
    answer = await official.chat.completions.create(
        model=MODEL, messages=CHAT, response_format=form, n=4, seed=7, temperature=1, top_p=1, max_tokens=MAX_TOKENS
    )

    ended = [choice.message.content for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        assert text is not None
        jsonschema.validate(json.loads(text), SCHEMAS[name])


async def test_json_object_is_an_object(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    (choice,) = answer.choices
    text = choice.message.content or ""
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


async def test_a_stream_is_the_same_text(official: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    fields: Any = {"model": MODEL, "messages": CHAT, "response_format": form, "seed": 3, "max_tokens": MAX_TOKENS}
    whole = await official.chat.completions.create(**fields)
    stream = await official.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]

    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_the_whole_text_matches_a_regular_expression(temperature: float, client: AsyncClient) -> None:
    answer = await client.generate("Today is", regex=DATE, temperature=temperature, seed=5, n=4, logprobs=2)

    for completion in answer.completions:
        assert completion.finish_reason == "stop"
        assert re.fullmatch(DATE, completion.text)


@pytest.mark.parametrize(
    "options",
    [
        {"choice": ["yes", "no", "maybe so"]},
        {"gbnf": 'root ::= ("yes" | "no" | "maybe" " so")'},
        {"grammar": 'start: "yes" | "no" | maybe\nmaybe: "maybe" " so"'},
    ],
    ids=["choice", "gbnf", "grammar"],
)
async def test_the_text_is_one_of_several(options: Any, client: AsyncClient) -> None:
    answer = await client.chat(CHAT, temperature=2, seed=1, n=8, **options)

    texts = {completion.text for completion in answer.completions}
    assert texts <= {"yes", "no", "maybe so"}
    assert len(texts) > 1


async def test_the_best_of_several_and_stops_and_penalties_keep_the_constraint(client: AsyncClient) -> None:
    answer = await client.generate(
        "Today is", regex=DATE, best_of=3, n=2, repetition_penalty=1.5, logit_bias={5: 50}, seed=2
    )
    assert all(re.fullmatch(DATE, completion.text) for completion in answer.completions)

    cut = await client.generate("Today is", regex=DATE, stop="day", temperature=0)
    assert cut.text in ("Mon", "Tues", "Wednes")


async def test_a_request_is_resumed_on_another_gateway(running: Deployment) -> None:
    first, second = running.state["grpc"]
    regex = "([a-z]{3,6} ){60}end"
    async with AsyncClient(first) as here, AsyncClient(second) as there:
        whole = await here.generate("Once upon a time", regex=regex, seed=9)
        stream = here.stream("Once upon a time", regex=regex, seed=9, request_id="mine", resume=False)
        received = ""
        async for chunk in stream:
            received += chunk.text
            if len(received) > 60:
                break
        rest = [chunk.text async for chunk in there.resume("mine")]

    assert re.fullmatch(regex, whole.text)
    assert "".join(rest) == whole.text
    assert whole.text.startswith(received)


async def test_hostile_constraints_are_refused_while_a_stream_runs(client: AsyncClient) -> None:
    hostile: list[Any] = [
        {"json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(40)]}},
        {"json_schema": {"enum": ["x" * 100] * 30_000}},
        {"json_schema": '{"items":' * 100_000},
        {"regex": "(" * 60_000 + ")" * 60_000},
        {"grammar": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "a"'},
    ]
    running = asyncio.create_task(client.generate("Once", max_tokens=60, ignore_eos=True, seed=1))
    for options in hostile:
        with pytest.raises(QuireError) as error:
            await client.generate("a", **options)
        assert error.value.reason in ("GRAMMAR_TOO_COMPLEX", "GRAMMAR_INVALID")
    with pytest.raises(QuireError, match=r"the message has 9\d{6} bytes, and may have 4194304") as error:
        await client.generate("a", json_schema={"enum": ["x" * 100] * 90_000})
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    assert len((await running).token_ids) == 60


async def test_a_constraint_that_becomes_too_complex_ends_its_request_alone(client: AsyncClient) -> None:
    """Gateways check a grammar up to its first token, so the request is accepted; the worker reaches a limit later."""
    running = asyncio.create_task(client.generate("Once", max_tokens=60, ignore_eos=True, seed=1))
    with pytest.raises(QuireError) as error:
        await client.generate("a", regex="[0-9]{3}" + "(a|b)?" * 200, max_tokens=400, seed=4)
    assert error.value.reason == "GRAMMAR_TOO_COMPLEX"
    assert error.value.message == "the constraint on the output takes more work for one token than the limits allow"
    assert len((await running).token_ids) == 60
    assert (await client.generate("Today is", regex=DATE, seed=5)).completions[0].finish_reason == "stop"
