"""The limits and the budget of a key hold for its generations and its embeddings together.

A deployment has two models: the first one generates, and the second one, MODEL_OF_TEXTS, computes embeddings. Its keys
are those of KEY_FILE.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx

from tests.acceptance.flood import WorkerTimes

MODEL_OF_TEXTS = "texts"
PER_MINUTE = 3_000
"""Tokens of the key with a budget."""
_REQUESTS_PER_MINUTE = 30
_LIMITS = {
    "budget": f"tokens_per_minute = {PER_MINUTE}",
    "rate": f"requests_per_minute = {_REQUESTS_PER_MINUTE}",
    "narrow": "max_running = 1",
    "short": "max_running = 1\nmax_queued = 4",
}
_TIMEOUT = 300  # seconds
_LEASE = PER_MINUTE // 10
_MANY_TOKENS = 1_500  # of a generation that runs for a second at least
# Of the one that waits for it: a client that is behind with the tokens of the first sees its end first nevertheless.
_TOKENS_OF_SECOND = 500


def key_of(tenant: str) -> str:
    """The key of a tenant with a limit."""
    return f"mixed-loads-key-of-{tenant}"


KEY_FILE = "".join(
    "\n".join(["[[keys]]", f'key = "{key_of(tenant)}"', f'tenant = "{tenant}"', limits, ""])
    for tenant, limits in _LIMITS.items()
)


@dataclass(frozen=True)
class TenantCalls:
    """Calls with a tenant's key. Each returns the status and what it cost: prompt and output in tokens."""

    client: httpx.AsyncClient
    tenant: str

    async def generate(self, prompt: list[int], max_tokens: int) -> tuple[int, int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return await self._call("/v1/completions", body)

    async def stream(self, prompt: list[int], max_tokens: int, on_tokens: Callable[[], object]) -> None:
        """As `generate`; `on_tokens` is called for each line of the answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_lines():
                on_tokens()

    async def embed(self, inputs: list[list[int]]) -> tuple[int, int]:
        return await self._call("/v1/embeddings", {"model": MODEL_OF_TEXTS, "input": inputs})

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post(path, json=body, headers=self._headers)

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {key_of(self.tenant)}"}

    async def _call(self, path: str, body: dict[str, Any]) -> tuple[int, int]:
        answer = await self.post(path, body)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            code = answer.json()["error"]["code"]
            if code != "tenant_quota_exceeded":
                raise AssertionError(f"{self.tenant}: refused with {code}")
            return answer.status_code, 0
        if answer.is_error:
            raise AssertionError(f"{self.tenant}: {path} was answered {answer.status_code}: {answer.text}")
        return answer.status_code, int(answer.json()["usage"]["total_tokens"])


@dataclass
class BudgetSpent:
    """What a key with a budget got in a time. `most_beyond` is the most by which it was ahead of its budget."""

    seconds: float = 0.0
    of_generations: int = 0
    of_embeddings: int = 0
    most_beyond: float = 0.0

    @property
    def delivered(self) -> int:
        return self.of_generations + self.of_embeddings

    @property
    def issued(self) -> float:
        """What the budget has issued in all."""
        return PER_MINUTE * (1 + self.seconds / 60)


async def spend_budget(http: str, seconds: float) -> BudgetSpent:
    """Spends a key's budget by generations and embeddings at once, for so many seconds."""
    spent, started = BudgetSpent(), monotonic()

    def count(cost: int, *, of_embeddings: bool) -> None:
        if of_embeddings:
            spent.of_embeddings += cost
        else:
            spent.of_generations += cost
        spent.seconds = monotonic() - started
        spent.most_beyond = max(spent.most_beyond, spent.delivered - spent.issued)

    async with httpx.AsyncClient(base_url=http, timeout=_TIMEOUT) as client:
        calls = TenantCalls(client, "budget")

        async def generations() -> None:
            while monotonic() < started + seconds:
                count((await calls.generate([5] * 16, 32))[1], of_embeddings=False)

        async def embeddings() -> None:
            while monotonic() < started + seconds:
                count((await calls.embed([[5] * 32] * 4))[1], of_embeddings=True)

        await asyncio.gather(*(work() for work in [generations, embeddings] * 4))
    return spent


def budget_errors(spent: BudgetSpent) -> list[str]:
    """What is wrong with how a budget was spent."""
    errors = []
    if spent.most_beyond > 0:
        errors.append(f"{spent.most_beyond:.0f} tokens were delivered beyond the budget")
    # The leader holds one lease, and what has begun has paid its prompt.
    if spent.delivered < spent.issued - 2 * _LEASE - 4 * (48 + 128):
        errors.append(f"only {spent.delivered} of {spent.issued:.0f} tokens were delivered")
    if not (spent.of_generations and spent.of_embeddings):
        errors.append(f"{spent.of_generations} tokens of generations, {spent.of_embeddings} of embeddings")
    return errors


async def limit_errors(http: str, worker_of_texts: str) -> list[str]:
    """What is wrong with limits of keys. `worker_of_texts` is where the embedding model's worker has its metrics."""
    async with httpx.AsyncClient(base_url=http, timeout=_TIMEOUT) as client:
        checks: list[Callable[[], Coroutine[None, None, list[str]]]] = [
            lambda: _rate_errors(TenantCalls(client, "rate")),
            lambda: _running_errors(TenantCalls(client, "narrow"), worker_of_texts),
            lambda: _queue_errors(TenantCalls(client, "short")),
        ]
        return [error for check in checks for error in await check()]


async def _rate_errors(calls: TenantCalls) -> list[str]:
    """requests_per_minute count generations and embeddings."""
    started = monotonic()
    half = _REQUESTS_PER_MINUTE * 2 // 3
    works = [calls.generate([5] * 4, 1) for _ in range(half)] + [calls.embed([[5] * 4]) for _ in range(half)]
    statuses = [status for status, _ in await asyncio.gather(*works)]
    taken = [sum(status == httpx.codes.OK for status in part) for part in (statuses[:half], statuses[half:])]
    most = _REQUESTS_PER_MINUTE * (1 + (monotonic() - started) / 60)
    if not (_REQUESTS_PER_MINUTE <= sum(taken) <= most and all(taken)):
        return [f"rate: {taken} generations and embeddings were taken, and at most {most:.0f} are allowed"]
    return []


async def _running_errors(calls: TenantCalls, worker_of_texts: str) -> list[str]:
    """With max_running 1 each input has a step of its own, and of two generations the second one waits."""
    errors, num_inputs = [], 16
    before = await _steps_at_rest(worker_of_texts)
    status, _ = await calls.embed([[5] * 8] * num_inputs)
    num_steps = await _steps_at_rest(worker_of_texts) - before
    # The last one may be followed by a step without inputs, which tells the worker that it has ended.
    if status != httpx.codes.OK or num_steps not in (num_inputs, num_inputs + 1):
        errors.append(f"max_running: {num_inputs} inputs were computed in {num_steps:.0f} steps, status {status}")
    ended, has_begun = list[int](), asyncio.Event()

    async def generate(number: int) -> None:
        await calls.stream([5] * 8, _TOKENS_OF_SECOND if number else _MANY_TOKENS, has_begun.set)
        ended.append(number)

    first = asyncio.create_task(generate(0))
    await asyncio.wait_for(has_begun.wait(), _TIMEOUT)
    await asyncio.gather(first, generate(1), calls.embed([[5]]))
    if ended != [0, 1]:
        errors.append(f"max_running: generations ended in the order {ended}")
    return errors


async def _steps_at_rest(worker: str) -> float:
    """The steps that a worker has counted, once it counts no more: a step is counted after its answer."""
    steps = -1.0
    while (found := WorkerTimes.now(worker).steps) != steps:
        steps = found
        await asyncio.sleep(0.5)
    return steps


async def _queue_errors(calls: TenantCalls) -> list[str]:
    """max_queued counts the requests that wait for each model."""
    errors = []
    refused = await calls.post("/v1/embeddings", {"model": MODEL_OF_TEXTS, "input": [[5] * 8] * 32})
    if refused.status_code != httpx.codes.BAD_REQUEST or refused.json()["error"]["param"] != "input[4]":
        errors.append(f"max_queued: a call with 32 inputs is answered {refused.status_code}: {refused.text}")
    first = asyncio.create_task(calls.generate([5] * 8, _MANY_TOKENS))
    await asyncio.sleep(0.5)
    statuses = [status for status, _ in await asyncio.gather(*(calls.generate([5] * 8, 1) for _ in range(10)))]
    if statuses.count(httpx.codes.OK) != 4:
        errors.append(f"max_queued: statuses of generations that wait: {statuses}")
    if (status := (await first)[0]) != httpx.codes.OK:
        errors.append(f"max_queued: a generation that runs has status {status}")
    if (status := (await calls.embed([[5] * 8] * 4))[0]) != httpx.codes.OK:
        errors.append(f"max_queued: a call with 4 inputs has status {status}")
    return errors
