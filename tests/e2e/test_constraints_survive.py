"""Constrained outputs are valid, and bit-equal when sequences are preempted, drafted, lose their worker or gateway."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deployment import Deployment, deployment
from large import large_but
from quire_client import AsyncClient, Generation
from until_preempted import until_preempted

MAX_TOKENS = 160
SCARCE = 20  # blocks of 16 tokens: for two or three of the sequences


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORD = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: list[Any] = [
    closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}, married={"type": "boolean"}),
    closed(point=closed(x={"type": "number", "minimum": -9, "maximum": 9}, y={"type": "number", "multipleOf": 0.5})),
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 20},
    {"$defs": {"leaf": closed(label=WORD)}, **closed(a={"$ref": "#/$defs/leaf"}, b={"$ref": "#/$defs/leaf"})},
    closed(when={"type": "string", "format": "date-time"}, id={"type": "string", "format": "uuid"}),
    {"oneOf": [closed(kind={"const": "cat"}, lives={"type": "integer"}), closed(kind={"const": "dog"}, name=WORD)]},
    {"allOf": [{"type": "string", "pattern": "^[A-Z][a-z]*( [a-z]+)*$"}, {"minLength": 40, "maxLength": 80}]},
]
REGEXES = [
    r"([a-z]{2,8} ){20,30}the end\.",
    r"(\d{3}-\d{4}, ){10,12}\d{3}-\d{4}",
    r"(<(b|i)>[a-z ]{1,20}</(b|i)>\n){5,8}",
    r"[^aeiou\n]{30,60}!",
]
PROMPTS = ["Once upon a time", "In JSON:", "The data of a person who lives in Paris:"]


def is_valid(schema: Any, text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


# The option of the client, and whether a text is valid.
CONSTRAINTS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    *(({"json_schema": schema}, lambda text, schema=schema: is_valid(schema, text)) for schema in SCHEMAS),
    *(({"regex": regex}, lambda text, regex=regex: bool(re.fullmatch(regex, text))) for regex in REGEXES),
    ({"choice": ["yes", "no, never"]}, lambda text: text in ("yes", "no, never")),
]
REQUESTS = [
    {
        **options,
        "prompt": PROMPTS[index % len(PROMPTS)],
        "seed": index,
        "temperature": index % 3 / 2,
        "n": 1 + index % 2,
    }
    for index, (options, _) in enumerate(CONSTRAINTS)
]
# None of them ends by itself.
LONG = [
    {"regex": "([a-z]{2,8} ){600,700}", "prompt": PROMPTS[0], "seed": seed, "temperature": 1, "max_tokens": 600}
    for seed in range(4)
]


async def ask(client: AsyncClient, request: dict[str, Any]) -> Generation:
    """The whole answer to a request, as a stream that is resumed where it breaks."""
    options = dict(request)
    return await client.stream(options.pop("prompt"), **{"max_tokens": MAX_TOKENS} | options).collect()


async def all_at_once(running: Deployment, meanwhile: Callable[[], Any] | None = None) -> list[list[list[int]]]:
    """The tokens of all requests; those that ended are valid."""
    answers = await answers_at_once(running, meanwhile)
    return [check(answer, is_good) for answer, (_, is_good) in zip(answers, CONSTRAINTS, strict=True)]


async def answers_at_once(running: Deployment, meanwhile: Callable[[], Any] | None = None) -> list[Generation]:
    """The answers to all requests. `meanwhile` is called in the middle."""
    num_before = running.metrics()["quire_generation_tokens_total"]
    async with AsyncClient(",".join(running.state["grpc"])) as client:
        asked = [asyncio.create_task(ask(client, request)) for request in REQUESTS]
        if meanwhile is not None:
            async with asyncio.timeout(300):
                while running.metrics()["quire_generation_tokens_total"] < num_before + 300:
                    await asyncio.sleep(0.02)
            assert not all(task.done() for task in asked)
            meanwhile()
        return await asyncio.gather(*asked)


def check(answer: Generation, is_good: Callable[[str], bool]) -> list[list[int]]:
    """The tokens of each sequence of a request."""
    for completion in answer.completions:
        if completion.finish_reason == "stop":
            assert is_good(completion.text), completion.text
    return [list(completion.token_ids) for completion in answer.completions]


@pytest.fixture(scope="module")
def running(shallow_model: Path) -> Iterator[Deployment]:
    with deployment(deterministic=1, gateways=2) as started:
        yield started


@pytest.fixture(scope="module")
def expected(running: Deployment) -> list[list[list[int]]]:
    """The tokens of the undisturbed requests, most of which end by themselves."""
    answers = asyncio.run(answers_at_once(running))
    ended = [one.finish_reason == "stop" for answer in answers for one in answer.completions]
    assert sum(ended) > len(ended) / 2
    return [check(answer, is_good) for answer, (_, is_good) in zip(answers, CONSTRAINTS, strict=True)]


async def test_each_alone(running: Deployment, expected: list[list[list[int]]]) -> None:
    """A schema, a regular expression and the choice: the others do not change the tokens of a request."""
    async with AsyncClient(running.state["grpc"][0]) as client:
        for index in (0, len(SCHEMAS), len(CONSTRAINTS) - 1):
            assert check(await ask(client, REQUESTS[index]), CONSTRAINTS[index][1]) == expected[index]


async def test_with_a_worker_killed_in_the_middle(running: Deployment, expected: list[list[list[int]]]) -> None:
    assert await all_at_once(running, lambda: running.kill("worker")) == expected


async def test_with_a_gateway_killed_in_the_middle(expected: list[list[list[int]]]) -> None:
    with deployment(deterministic=1, gateways=2, drafter="ngram") as started:
        assert await all_at_once(started, lambda: started.kill("gateway-0")) == expected


@pytest.mark.parametrize("preemption", large_but(["swap", "recompute"], "swap"))
async def test_with_few_blocks(preemption: str, expected: list[list[list[int]]]) -> None:
    with deployment(deterministic=1, num_blocks=SCARCE, preemption=preemption) as scarce:
        async for answers in until_preempted(scarce, preemption, lambda: all_at_once(scarce)):
            assert answers == expected


async def test_with_a_worker_that_drains_in_the_middle(running: Deployment, expected: list[list[list[int]]]) -> None:
    async with AsyncClient(running.grpc) as client:
        expected_of_long = await asyncio.gather(*(ask(client, request) for request in LONG))
    with deployment(deterministic=1, workers=2) as started:
        pid = started.state["roles"]["worker-0"]["pid"]
        async with AsyncClient(started.grpc) as client, asyncio.timeout(300):
            long = [asyncio.create_task(ask(client, request)) for request in LONG]
            while not started.metrics("worker_metrics").get('quire_worker_tokens_total{kind="decode"}'):
                await asyncio.sleep(0.02)
            others = asyncio.create_task(all_at_once(started, lambda: started.kill("worker-0", signal.SIGTERM)))
            while started.state["roles"]["worker-0"]["pid"] == pid:
                await asyncio.sleep(0.02)
            # It had some of these, and has ended before they have.
            assert not any(task.done() for task in long)
            assert await others == expected
            answers = await asyncio.gather(*long)
    for answer, undisturbed in zip(answers, expected_of_long, strict=True):
        assert answer.token_ids == undisturbed.token_ids
        assert answer.finish_reason == "length"
        assert re.fullmatch(r"([a-z]{2,8} )*[a-z]{0,8}", answer.text)
