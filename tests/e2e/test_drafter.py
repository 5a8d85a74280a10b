"""A worker with a drafter returns bit-identical results in fewer steps."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from deployment import Deployment, deployment
from large import large_but
from quire_client import AsyncClient
from quire_client.results import Completion, FinishReason
from until_preempted import until_preempted

DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "
CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
NUM_TOKENS = 40
PLENTY, SCARCE = 256, 20  # blocks

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (DAYS * 4, {"logprobs": 2}),
    (DAYS * 3, {"temperature": 0.7, "seed": 3, "logprobs": 0}),
    (DAYS * 2, {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "n": 2}),
    (CODE, {"stop": ["\n\n\ndef"], "logprobs": 1}),
    (CODE, {"temperature": 0.8, "top_p": 0.9, "seed": 5, "min_tokens": 20, "stop": [" return"]}),
    (DAYS * 4, {"stop": ["Wednesday, Thursday"], "include_stop": True}),
    (DAYS * 4, {"max_tokens": 1}),
    (DAYS * 4, {"max_tokens": 7, "logprobs": 5}),
    ("Once upon a time", {"presence_penalty": 0.5}),
    (DAYS, {"beam_width": 3, "max_tokens": 12}),
]

Answer = tuple[Completion, ...]


async def _ask(client: AsyncClient, prompt: str, **options: Any) -> Answer:
    generation = await client.generate(prompt, **{"temperature": 0, "max_tokens": NUM_TOKENS, **options})
    return generation.completions


async def _ask_all(running: Deployment) -> list[Answer]:
    async with AsyncClient(running.grpc) as client:
        return await asyncio.gather(*(_ask(client, prompt, **options) for prompt, options in REQUESTS))


@pytest.fixture(scope="module")
def expected(model: object) -> list[Answer]:
    """The results without a drafter."""
    with deployment(num_blocks=PLENTY) as plain:
        return asyncio.run(_ask_all(plain))


@pytest.fixture(scope="module")
def drafting(model: object) -> Iterator[Deployment]:
    with deployment(num_blocks=PLENTY, drafter="ngram") as running:
        yield running


async def test_all_at_once(drafting: Deployment, expected: list[Answer]) -> None:
    assert await _ask_all(drafting) == expected
    assert drafting.metrics("worker_metrics")["quire_worker_accepted_draft_tokens_total"] > NUM_TOKENS


async def test_a_text_that_repeats_takes_fewer_steps_than_tokens(drafting: Deployment, expected: list[Answer]) -> None:
    async with AsyncClient(drafting.grpc) as client:
        before = drafting.metrics("worker_metrics")["quire_worker_steps_total"]
        assert await _ask(client, DAYS * 4, logprobs=2) == expected[0]
        num_steps = drafting.metrics("worker_metrics")["quire_worker_steps_total"] - before
    assert len(expected[0][0].token_ids) == NUM_TOKENS
    # One step for the prompt, and a last one without work.
    assert num_steps < NUM_TOKENS * 0.7


@pytest.mark.parametrize("place", range(20, 26))
async def test_a_stop_token_among_accepted_drafts_ends_the_sequence(
    place: int, drafting: Deployment, expected: list[Answer]
) -> None:
    (whole,) = expected[0]
    stop = whole.token_ids[place]
    end = whole.token_ids.index(stop)
    async with AsyncClient(drafting.grpc) as client:
        (cut,) = await _ask(client, DAYS * 4, logprobs=2, stop_token_ids=[stop])
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: end + 1]
    assert cut.logprobs == whole.logprobs[: end + 1]


async def test_with_a_worker_killed_in_the_middle(drafting: Deployment, expected: list[Answer]) -> None:
    before = drafting.metrics()["quire_generation_tokens_total"]
    answers = asyncio.create_task(_ask_all(drafting))
    while drafting.metrics()["quire_generation_tokens_total"] < before + 3 * NUM_TOKENS:
        await asyncio.sleep(0.01)
        assert not answers.done()
    drafting.kill("worker")
    assert await answers == expected


@pytest.mark.parametrize("preemption", large_but(["swap", "recompute"], "recompute"))
async def test_with_so_few_blocks_that_sequences_are_preempted(preemption: str, expected: list[Answer]) -> None:
    with deployment(num_blocks=SCARCE, preemption=preemption, drafter="ngram", max_draft_tokens=7) as scarce:
        async for answers in until_preempted(scarce, preemption, lambda: _ask_all(scarce)):
            assert answers == expected
        blocks = await scarce.rest()
        assert blocks["free"] + blocks["cached"] == SCARCE
