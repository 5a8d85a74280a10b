"""Deterministic mode: tokens and log-probabilities come to the same bits, alone or in a crowd, whatever happens."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient

NUM_REQUESTS, NUM_TOKENS = 200, 14
MAX_PROMPT = 44
BLOCK = 16
MAX_SEQUENCES = 64  # of a step, on a processor
# What a step's sequences would want at most, and a third of it
WANTED = MAX_SEQUENCES * -(-(MAX_PROMPT + NUM_TOKENS) // BLOCK)
SCARCE = WANTED // 3


@dataclass(frozen=True)
class Request:
    """A prompt, and how it draws."""

    prompt: list[int]
    options: dict[str, Any]


def requests() -> list[Request]:
    """Prompts of all lengths, a third of which begin alike, with sampling of every kind and logprobs of 0 to 5."""
    rng = random.Random(4)
    shared = [rng.randrange(1000, 40000) for _ in range(2 * BLOCK)]
    made = []
    for seed in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, MAX_PROMPT - len(shared)))]
        kind: dict[str, Any] = rng.choice(
            [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {}, {"frequency_penalty": 0.6, "repetition_penalty": 1.2}]
        )
        options = {"temperature": rng.choice([0.7, 1.0, 1.4]), "seed": seed, "logprobs": seed % 6, **kind}
        made.append(Request(shared + prompt if seed % 3 == 0 else prompt, options))
    return made


REQUESTS = requests()

Told = list[tuple[int, str, list[tuple[int, str]]]]
"""Of each token its id and the bits of its log-probability, and the same of the likeliest in its place."""


class Serving:
    """Requests on their way, and how many tokens have come."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self.num_tokens = 0

    async def ask(self, client: AsyncClient, request: Request) -> Told:
        """One request, to its end."""
        stream = client.stream(request.prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **request.options)
        answer: Told = []
        async for chunk in stream:
            self.num_tokens += len(chunk.token_ids)
            answer += [
                (one.token_id, one.logprob.hex(), [(top.token_id, top.logprob.hex()) for top in one.top])
                for one in chunk.logprobs
            ]
        assert len(answer) == NUM_TOKENS
        return answer

    async def alone(self) -> list[Told]:
        """Each when the one before it has ended."""
        async with AsyncClient(self._running.grpc) as client:
            return [await self.ask(client, request) for request in REQUESTS]

    async def crowd(self) -> list[Told]:
        """All at once."""
        async with AsyncClient(self._running.grpc) as client:
            return await asyncio.gather(*(self.ask(client, request) for request in REQUESTS))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Deployment]:
    with deployment(deterministic=1, num_blocks=2 * WANTED) as started:
        yield started


@pytest.fixture(scope="module")
def expected(running: Deployment) -> list[Told]:
    return asyncio.run(Serving(running).alone())


async def test_in_a_crowd(running: Deployment, expected: list[Told]) -> None:
    assert await Serving(running).crowd() == expected


async def test_with_a_worker_killed_in_the_middle(running: Deployment, expected: list[Told]) -> None:
    serving = Serving(running)
    answers = asyncio.create_task(serving.crowd())
    while serving.num_tokens < NUM_REQUESTS * NUM_TOKENS // 3:
        await asyncio.sleep(0.01)
        assert not answers.done()
    running.kill("worker")
    assert await answers == expected


async def test_in_chunks_of_32(expected: list[Told]) -> None:
    with deployment(deterministic=1, max_step_tokens=32) as chunked:
        assert await Serving(chunked).crowd() == expected


async def test_with_a_drafter(expected: list[Told]) -> None:
    with deployment(deterministic=1, drafter="ngram", num_blocks=WANTED) as drafting:
        assert await Serving(drafting).crowd() == expected
        assert drafting.metrics("worker_metrics")["quire_worker_accepted_draft_tokens_total"] > 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_with_a_third_of_the_blocks(preemption: str, expected: list[Told]) -> None:
    with deployment(deterministic=1, num_blocks=SCARCE, preemption=preemption) as scarce:
        assert await Serving(scarce).crowd() == expected
        assert scarce.metrics()[f'quire_preemptions_total{{choice="{preemption}"}}'] > 0
