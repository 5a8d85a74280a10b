"""Keeping requests in flight."""

import asyncio

import pytest

from quire_client.bench.latency import RequestTimings, TokenArrival
from quire_client.bench.load import run_load
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import OnTokens, TargetError, TargetModel


class Turnstile:
    """A target whose requests end when a test releases them."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Semaphore(0)

    async def model(self) -> TargetModel:
        """Not used."""
        raise NotImplementedError

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        """Ends when released: with an error for a prompt that starts with 13, with one token too few for 14."""
        name = request.prompt_token_ids[0]
        self.started.append(name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.gate.acquire()
        self.running -= 1
        if name == 13:
            raise TargetError("unlucky")
        num_tokens = request.output_tokens - (name == 14)
        on_tokens(num_tokens)
        return RequestTimings(0.0, (TokenArrival(1.0, num_tokens),))


def named(*names: int) -> list[MixRequest]:
    return [MixRequest((name,) * 3, 5) for name in names]


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 1), (3, 3), (50, 7)])
async def test_concurrency_bounds_the_requests_in_flight(concurrency: int, expected: int) -> None:
    target = Turnstile()
    load = asyncio.create_task(run_load(target, named(*range(7)), concurrency))
    while len(target.started) < 7:
        await asyncio.sleep(0)
        if target.running == expected:
            target.gate.release()
    for _ in range(expected):
        target.gate.release()

    assert len((await load).timelines) == 7
    assert target.most_running == expected


async def test_requests_are_sent_in_their_order() -> None:
    target = Turnstile()
    load = asyncio.create_task(run_load(target, named(3, 1, 2), 2))
    for _ in range(3):
        target.gate.release()
    await load

    assert target.started == [3, 1, 2]


async def test_a_failure_ends_no_other_request_and_is_counted_by_its_reason() -> None:
    target = Turnstile()
    for _ in range(4):
        target.gate.release()
    tokens: list[int] = []
    ends: list[None] = []

    load = await run_load(target, named(1, 13, 2, 13), 2, tokens.append, lambda: ends.append(None))

    assert dict(load.failures) == {"unlucky": 2}
    assert (len(load.timelines), load.prompt_tokens) == (2, 6)
    assert (tokens, len(ends)) == ([5, 5], 4)
    assert load.summary is not None
    assert load.summary.output_tokens == 10


async def test_requests_of_the_wrong_length_are_counted() -> None:
    target = Turnstile()
    for _ in range(3):
        target.gate.release()

    assert (await run_load(target, named(14, 1, 14), 3)).num_short == 2


async def test_a_load_without_an_answer_has_no_figures() -> None:
    target = Turnstile()
    target.gate.release()

    assert (await run_load(target, named(13), 1)).summary is None
