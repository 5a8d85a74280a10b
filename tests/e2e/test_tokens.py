"""Greedy sampling in float32: every token equals transformers, also under concurrency, faults and preemption."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from deployment import Deployment, deployment
from large import large_but
from prompt_scores import reference_scores
from quire_client import AsyncClient, Generation
from reference import MAX_TIES, NEW_TOKENS, Reference, prompts
from until_preempted import until_preempted

FEW_TOKENS = 18  # every sequence crosses a border of blocks
SCARCE = 50  # blocks: the longest prompt and 100 tokens fill them


async def serve(client: AsyncClient, reference: Reference, max_tokens: int = NEW_TOKENS) -> Generation:
    """Continues one prompt greedily, ignoring end-of-text."""
    return await client.generate(reference.prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def serve_all(running: Deployment, judged: list[Reference], max_tokens: int = NEW_TOKENS) -> list[Generation]:
    """Runs all prompts at once."""
    async with AsyncClient(running.grpc) as client:
        return await asyncio.gather(*(serve(client, reference, max_tokens) for reference in judged))


def one_of_each_length(judged: list[Reference]) -> list[Reference]:
    """The reference of one prompt of each length, text and random tokens in turn."""
    return [judged[2 * i + i % 2] for i in range(len(judged) // 2)]


def first_tokens(judged: list[Reference]) -> list[Reference]:
    """The references cut to FEW_TOKENS."""
    return [replace(reference, tokens=reference.tokens[:FEW_TOKENS]) for reference in judged]


def judge(judged: list[Reference], generations: list[Generation]) -> None:
    """Raises AssertionError for a wrong continuation."""
    pairs = zip(judged, generations, strict=True)
    assert sum(reference.judge(generation.token_ids[:NEW_TOKENS]) for reference, generation in pairs) <= MAX_TIES


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    with deployment(dtype="float32", num_threads=2) as started:
        yield started


async def test_one_at_a_time(running: Deployment, judged: list[Reference]) -> None:
    lone = first_tokens(one_of_each_length(judged))
    async with AsyncClient(running.grpc) as client:
        judge(lone, [await serve(client, reference, FEW_TOKENS) for reference in lone])


async def test_log_probabilities_of_prompts_are_those_of_transformers(running: Deployment, model: Path) -> None:
    prompt = next(one for one in prompts(model) if len(one) == 257)
    scores = reference_scores(model, prompt)
    expected = [float(scores[row, token]) for row, token in enumerate(prompt[1:])]
    async with AsyncClient(running.grpc) as client:
        alone = await client.generate(prompt, max_tokens=0, prompt_logprobs=2)
        # The second one finds the prompt in the prefix cache.
        both = await client.generate(prompt, max_tokens=2, n=2, prompt_logprobs=2, ignore_eos=True)
    assert (alone.token_ids, alone.usage.completion_tokens) == ((), 0)
    assert both.usage.completion_tokens == 4
    for generation in (alone, both):
        assert generation.prompt is not None
        assert generation.prompt.token_ids == prompt
        assert [one.token_id for one in generation.prompt.logprobs] == list(prompt[1:])
        assert [one.logprob for one in generation.prompt.logprobs] == pytest.approx(expected, abs=1e-3)
        tops = [[top.logprob for top in one.top] for one in generation.prompt.logprobs]
        assert tops == [pytest.approx(row.topk(2).values.tolist(), abs=1e-3) for row in scores]


async def test_log_likelihoods_over_http_are_those_of_transformers(running: Deployment, model: Path) -> None:
    """As lm_eval asks for them: prompts of token ids, echoed with their log-probabilities."""
    given = [one for one in prompts(model) if len(one) in (63, 64)]
    body = {"prompt": [list(one) for one in given], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(base_url=running.http, timeout=300) as client:
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(given)))
    for choice, prompt in zip(choices, given, strict=True):
        scores = reference_scores(model, prompt)
        logprobs = choice["logprobs"]
        first, *values = logprobs["token_logprobs"][:-1]
        assert first is None
        assert values == pytest.approx([float(scores[row, token]) for row, token in enumerate(prompt[1:])], abs=1e-3)
        greedy = [value == max(top.values()) for value, top in zip(values, logprobs["top_logprobs"][1:-1], strict=True)]
        assert greedy == [int(row.argmax()) == token for row, token in zip(scores, prompt[1:], strict=True)]


async def test_with_hits_in_the_prefix_cache(running: Deployment, judged: list[Reference]) -> None:
    known = one_of_each_length(judged)
    await serve_all(running, known, max_tokens=1)
    hits = 'quire_prefix_cache_hits_total{tier="device"}'
    before = running.metrics()[hits]
    generations = await serve_all(running, known, FEW_TOKENS)
    judge(first_tokens(known), generations)
    assert all(g.usage.cached_tokens >= len(r.prompt) - 16 for r, g in zip(known, generations, strict=True))
    assert running.metrics()[hits] > before


async def test_all_at_once(running: Deployment, judged: list[Reference]) -> None:
    with running.admin() as admin:
        admin.reset_prefix_cache()
    generations = await serve_all(running, judged)
    judge(judged, generations)
    assert not any(generation.usage.cached_tokens for generation in generations)
    await running.rest()


async def test_worker_that_is_killed_costs_no_token(running: Deployment, judged: list[Reference]) -> None:
    before = running.metrics()["quire_generation_tokens_total"]
    restarts_before = running.state["roles"]["worker"]["restarts"]
    async with AsyncClient(running.grpc) as client:
        serving = [asyncio.create_task(serve(client, reference)) for reference in judged[:8]]
        while running.metrics()["quire_generation_tokens_total"] < before + 50:
            await asyncio.sleep(0.02)
        running.kill("worker")
        judge(judged[:8], await asyncio.gather(*serving))
    assert running.state["roles"]["worker"]["restarts"] == restarts_before + 1


async def test_in_chunks_of_32_tokens(model: object, judged: list[Reference]) -> None:
    chunked = one_of_each_length(judged)
    with deployment(dtype="float32", max_step_tokens=32) as started:
        judge(first_tokens(chunked), await serve_all(started, chunked, FEW_TOKENS))


@pytest.mark.parametrize("preemption", large_but(["swap", "recompute"], "swap"))
async def test_with_so_few_blocks_that_sequences_are_preempted(
    model: object, judged: list[Reference], preemption: str
) -> None:
    competing = one_of_each_length(judged)[1::2]  # with the longest one
    with deployment(dtype="float32", num_blocks=SCARCE, preemption=preemption) as started:
        # Sequences longer than the reference compete for more blocks.
        async for answers in until_preempted(
            started, preemption, lambda: serve_all(started, competing, max_tokens=100)
        ):
            judge(competing, answers)
        assert preemption == "swap" or started.metrics()['quire_preemptions_total{method="swap"}'] == 0
        blocks = await started.rest()
        assert blocks["free"] + blocks["cached"] == SCARCE
