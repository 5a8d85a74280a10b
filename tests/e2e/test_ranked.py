"""Beam search, best_of, n and a shared prefix as clients request them, on the real model in float32."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

import reference
from beams import BeamJudge, Search
from benchmarks.serving.loads import shared_prefix_requests
from deployment import Deployment, deployment
from quire_client import AsyncClient

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True}
BLOCK = 16


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    with deployment(dtype="float32") as started:
        yield started


@pytest.fixture(scope="module")
def judge(model: Path) -> BeamJudge:
    return BeamJudge(model)


@pytest.fixture(scope="module")
def given(model: Path) -> list[tuple[int, ...]]:
    """The forty prompts."""
    return reference.prompts(model)


async def chat_prompt(running: Deployment) -> tuple[int, ...]:
    """A question. Its most probable answers end with a stop token."""
    async with AsyncClient(running.grpc) as client:
        return (await client.tokenize(CHAT)).token_ids


@pytest.mark.parametrize(
    ("width", "n", "length_penalty", "early_stopping"),
    [
        (4, 4, 1.0, False),
        (4, 4, -0.5, True),
        (4, 4, 2.0, "never"),
        pytest.param(3, 1, 0.0, False, marks=pytest.mark.large),
    ],
)
async def test_beams_are_those_of_transformers(
    running: Deployment,
    judge: BeamJudge,
    given: list[tuple[int, ...]],
    width: int,
    n: int,
    length_penalty: float,
    early_stopping: Any,
) -> None:
    prompts = [await chat_prompt(running), given[22]]
    searches = [Search(prompt, width, n, length_penalty, early_stopping) for prompt in prompts]
    async with AsyncClient(running.grpc) as client:
        answers = await asyncio.gather(
            *(
                client.generate(
                    search.prompt,
                    max_tokens=search.max_tokens,
                    n=n,
                    beam_width=width,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                )
                for search in searches
            )
        )
    for search, answer in zip(searches, answers, strict=True):
        found = judge.search(search)
        assert [one.token_ids for one in answer.completions] == [one.token_ids for one in found]
        assert [one.score for one in answer.completions] == pytest.approx([one.score for one in found], rel=1e-4)


async def test_beams_over_http_are_those_of_transformers(running: Deployment, judge: BeamJudge) -> None:
    search = Search(await chat_prompt(running), 4, 4, 1.0, False)
    body = {"messages": CHAT, "max_tokens": search.max_tokens, "n": 3, "best_of": 4, "use_beam_search": True}
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as http, AsyncClient(running.grpc) as client:
        answer = await http.post("/v1/chat/completions", json=body)
        texts = [await client.detokenize(found.token_ids) for found in judge.search(search)[:3]]
    choices = answer.raise_for_status().json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == texts
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3


async def test_best_of_gives_the_likeliest_of_what_n_draws(running: Deployment, given: list[tuple[int, ...]]) -> None:
    prompt = given[8]
    body = {"prompt": list(prompt), "n": 2, "best_of": 4, **DRAWN}
    async with AsyncClient(running.grpc) as client:
        every = await client.generate(prompt, n=4, logprobs=0, **DRAWN)
        best = await client.generate(prompt, n=2, best_of=4, **DRAWN)
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as http:
        over_http = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    means = [sum(one.logprob for one in drawn.logprobs) / len(drawn.logprobs) for drawn in every.completions]
    ranked = sorted(range(4), key=lambda place: -means[place])[:2]
    assert len(set(means)) == 4
    assert [one.token_ids for one in best.completions] == [every.completions[place].token_ids for place in ranked]
    assert [one.score for one in best.completions] == pytest.approx([means[place] for place in ranked])
    assert [choice["text"] for choice in over_http["choices"]] == [one.text for one in best.completions]
    assert best.usage.completion_tokens == over_http["usage"]["completion_tokens"] == 4 * DRAWN["max_tokens"]


async def test_what_n_draws_does_not_depend_on_n(running: Deployment, given: list[tuple[int, ...]]) -> None:
    async with AsyncClient(running.grpc) as client:
        counted = await asyncio.gather(*(client.generate(given[14], n=n, **DRAWN) for n in (1, 2, 3, 4)))
    four = [one.token_ids for one in counted[3].completions]
    assert len(set(four)) == 4
    for n, answer in enumerate(counted[:3], start=1):
        assert [one.token_ids for one in answer.completions] == four[:n]


async def test_prefix_of_requests_that_arrive_at_once_is_computed_once(running: Deployment, model: Path) -> None:
    requests = shared_prefix_requests(Tokenizer.from_file(str(model / "tokenizer.json")), 16)
    prompts = [request.prompt_token_ids for request in requests]
    num_shared = next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    in_full_blocks = num_shared // BLOCK * BLOCK
    before = running.metrics()["quire_tokens_computed_total"]
    async with AsyncClient(running.grpc) as client:
        await asyncio.gather(
            *(client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True) for prompt in prompts)
        )
    computed = running.metrics()["quire_tokens_computed_total"] - before
    assert computed == in_full_blocks + sum(len(prompt) - in_full_blocks + 3 for prompt in prompts)
