"""Deterministic mode: tokens and log-probabilities are bit-identical for a request alone and for one of many, also over
a worker's death, chunked prefill, speculation and preemption. All of it also with weights in 8 and in 4 bits and
products of integers, and with keys and values in 8 bits, for half as many requests."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployment import Deployment, deployment
from large import large_but
from quire_client import AsyncClient
from until_preempted import until_preempted

NUM_REQUESTS, NUM_TOKENS = 80, 14
MAX_PROMPT = 44
BLOCK = 16


@dataclass(frozen=True)
class Request:
    """A prompt with its sampling parameters."""

    prompt: list[int]
    options: dict[str, Any]


def requests() -> list[Request]:
    """Prompts of all lengths, with every sampling parameter and logprobs of 0 to 5. A third of them share a prefix."""
    rng = random.Random(4)
    shared = [rng.randrange(1000, 40000) for _ in range(2 * BLOCK)]
    made = []
    for seed in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, MAX_PROMPT - len(shared)))]
        kind: dict[str, Any] = rng.choice(
            [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}, {}, {"frequency_penalty": 0.6, "repetition_penalty": 1.2}]
        )
        options = {"temperature": rng.choice([0.7, 1.0, 1.4]), "seed": seed, "logprobs": seed % 6, **kind}
        if seed % 8 == 1:  # a continuation that a drafter guesses: rightly, or for every other one of them wrongly
            is_right = seed % 16 == 1
            prompt = prompt[: 1 if is_right else 4] * 3
            options = {"temperature": 0, "logprobs": seed % 6}
            options |= {"logit_bias": {prompt[0]: 50.0}} if is_right else {}
        made.append(Request(shared + prompt if seed % 3 == 0 else prompt, options))
    return made


REQUESTS = requests()

TokenBits = list[tuple[int, str, list[tuple[int, str]]]]
"""For each token: its id, its log-probability as hex, and the same two for each of the top tokens at its position."""


class Serving:
    """Sends requests and counts the tokens that have arrived."""

    def __init__(self, running: Deployment) -> None:
        self._running = running
        self.num_tokens = 0

    async def ask(self, client: AsyncClient, request: Request) -> TokenBits:
        """Runs one request to its end."""
        stream = client.stream(request.prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **request.options)
        answer: TokenBits = []
        async for chunk in stream:
            self.num_tokens += len(chunk.token_ids)
            answer += [
                (one.token_id, one.logprob.hex(), [(top.token_id, top.logprob.hex()) for top in one.top])
                for one in chunk.logprobs
            ]
        assert len(answer) == NUM_TOKENS
        return answer

    async def alone(self, requests: list[Request]) -> list[TokenBits]:
        """Runs requests one after another."""
        async with AsyncClient(self._running.grpc) as client:
            return [await self.ask(client, request) for request in requests]

    async def crowd(self, requests: list[Request]) -> list[TokenBits]:
        """Runs requests all at once."""
        async with AsyncClient(self._running.grpc) as client:
            return await asyncio.gather(*(self.ask(client, request) for request in requests))


@dataclass(frozen=True)
class Case:
    """Settings of a deployment, and what it is sent: more requests than fit into a step."""

    settings: dict[str, str | int]
    requests: list[Request]
    max_sequences: int

    @property
    def wanted(self) -> int:
        """Blocks for the longest sequences of a full step."""
        return self.max_sequences * -(-(MAX_PROMPT + NUM_TOKENS) // BLOCK)

    def deployment(self, **others: str | int) -> AbstractContextManager[Deployment]:
        """One with these settings and others."""
        return deployment(deterministic=1, max_sequences=self.max_sequences, **self.settings, **others)


CASES = {
    "as it is": Case({}, REQUESTS, 64),
    "w8a8": Case({"quantization": "w8a8"}, REQUESTS[: NUM_REQUESTS // 2], 32),
    "w4a8, kv int8": Case({"quantization": "w4a8", "kv_cache_dtype": "int8"}, REQUESTS[: NUM_REQUESTS // 2], 32),
}


@pytest.fixture(scope="module", params=large_but(CASES, "as it is", "w4a8, kv int8"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def running(shallow_model: Path, case: Case) -> Iterator[Deployment]:
    with case.deployment(num_blocks=2 * case.wanted) as started:
        yield started


@pytest.fixture(scope="module")
def expected(running: Deployment, case: Case) -> list[TokenBits]:
    return asyncio.run(Serving(running).alone(case.requests))


async def test_in_a_crowd(running: Deployment, case: Case, expected: list[TokenBits]) -> None:
    assert await Serving(running).crowd(case.requests) == expected


async def test_with_a_worker_killed_in_the_middle(running: Deployment, case: Case, expected: list[TokenBits]) -> None:
    serving = Serving(running)
    answers = asyncio.create_task(serving.crowd(case.requests))
    while serving.num_tokens < len(case.requests) * NUM_TOKENS // 3:
        await asyncio.sleep(0.01)
        assert not answers.done()
    running.kill("worker")
    assert await answers == expected


async def test_with_a_sixth_of_the_blocks(case: Case, expected: list[TokenBits]) -> None:
    with case.deployment(num_blocks=case.wanted // 6, preemption="recompute") as scarce:
        async for answers in until_preempted(scarce, "recompute", lambda: Serving(scarce).crowd(case.requests)):
            assert answers == expected


async def test_in_chunks_with_a_drafter_and_a_tenth_of_the_blocks(case: Case, expected: list[TokenBits]) -> None:
    settings: dict[str, Any] = {"max_step_tokens": 32, "drafter": "ngram", "preemption": "swap"}
    # In small steps fewer sequences run at once.
    with case.deployment(num_blocks=case.wanted // 10, **settings) as scarce:
        async for answers in until_preempted(scarce, "swap", lambda: Serving(scarce).crowd(case.requests)):
            assert answers == expected
        assert scarce.metrics("worker_metrics")["quire_worker_accepted_draft_tokens_total"] > 0
