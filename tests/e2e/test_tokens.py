"""Greedy sampling in float32: every token equals transformers, also under concurrency, faults and preemption."""

import asyncio
from collections.abc import Iterator

import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, Generation
from reference import MAX_TIES, NEW_TOKENS, Reference


async def serve(client: AsyncClient, reference: Reference, max_tokens: int = NEW_TOKENS) -> Generation:
    """Continues one prompt greedily, ignoring end-of-text."""
    return await client.generate(reference.prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def serve_all(running: Deployment, judged: list[Reference], max_tokens: int = NEW_TOKENS) -> list[Generation]:
    """Runs all prompts at once."""
    async with AsyncClient(running.grpc) as client:
        return await asyncio.gather(*(serve(client, reference, max_tokens) for reference in judged))


def judge(judged: list[Reference], generations: list[Generation]) -> None:
    """Raises AssertionError for a wrong continuation."""
    pairs = zip(judged, generations, strict=True)
    assert sum(reference.judge(generation.token_ids[:NEW_TOKENS]) for reference, generation in pairs) <= MAX_TIES


@pytest.fixture(scope="module")
def running(model: object) -> Iterator[Deployment]:
    with deployment(dtype="float32") as started:
        yield started


async def test_one_at_a_time(running: Deployment, judged: list[Reference]) -> None:
    async with AsyncClient(running.grpc) as client:
        judge(judged, [await serve(client, reference) for reference in judged])


async def test_with_hits_in_the_prefix_cache(running: Deployment, judged: list[Reference]) -> None:
    await serve_all(running, judged)
    hits = 'quire_prefix_cache_hits_total{tier="device"}'
    before = running.metrics()[hits]
    generations = await serve_all(running, judged)
    judge(judged, generations)
    assert all(g.usage.cached_tokens >= len(r.prompt) - 16 for r, g in zip(judged, generations, strict=True))
    assert running.metrics()[hits] > before


async def test_all_at_once(model: object, judged: list[Reference]) -> None:
    with deployment(dtype="float32") as started:
        judge(judged, await serve_all(started, judged))
        await started.rest()


async def test_in_chunks_of_32_tokens(model: object, judged: list[Reference]) -> None:
    with deployment(dtype="float32", max_step_tokens=32) as started:
        judge(judged, await serve_all(started, judged))


@pytest.mark.parametrize("preemption", ["auto", "swap", "recompute"])
async def test_with_so_few_blocks_that_sequences_are_preempted(
    model: object, judged: list[Reference], preemption: str
) -> None:
    with deployment(dtype="float32", num_blocks=60, preemption=preemption) as started:
        # Sequences longer than the reference compete for more blocks.
        judge(judged, await serve_all(started, judged, max_tokens=160))
        metrics = started.metrics()
        swaps, recomputes = (metrics[f'quire_preemptions_total{{method="{way}"}}'] for way in ("swap", "recompute"))
        assert swaps + recomputes >= 20
        assert swaps >= 20 or preemption != "swap"
        assert swaps == 0 or preemption != "recompute"
        blocks = await started.rest()
        assert blocks["free"] + blocks["cached"] == 60


async def test_worker_that_is_killed_costs_no_token(model: object, judged: list[Reference]) -> None:
    with deployment(dtype="float32") as started:
        async with AsyncClient(started.grpc) as client:
            serving = [asyncio.create_task(serve(client, reference)) for reference in judged[:8]]
            while started.metrics()["quire_generation_tokens_total"] < 50:
                await asyncio.sleep(0.02)
            started.kill("worker")
            judge(judged[:8], await asyncio.gather(*serving))
        assert started.state["roles"]["worker"]["restarts"] == 1
