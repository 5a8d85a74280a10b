"""64 clients, half of them disconnect at random moments. The others receive every token, and no block is lost."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient, QuireError
from reference import NEW_TOKENS, Reference

ENDLESS: dict[str, Any] = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}  # more than any client reads

Leave = Callable[[Deployment, Reference, float], Coroutine[None, None, None]]


async def break_stream(running: Deployment, reference: Reference, seconds: float) -> None:
    """A gRPC client that stops reading and cancels its call."""
    async with AsyncClient(running.grpc) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.generate(reference.prompt, **ENDLESS)


async def cancel_by_name(running: Deployment, reference: Reference, seconds: float) -> None:
    """A client that ends its request by name, over another connection."""
    name = f"crowd-{random.getrandbits(64):x}"
    async with AsyncClient(running.grpc) as client, AsyncClient(running.grpc) as other:
        serving = asyncio.create_task(client.generate(reference.prompt, request_id=name, **ENDLESS))
        await asyncio.sleep(seconds)
        while not serving.done():  # a cancel that arrives before its request has no effect
            await other.cancel(name)
            await asyncio.wait([serving], timeout=0.2)
        with pytest.raises(QuireError) as raised:
            await serving
        assert raised.value.reason == "CANCELLED"


async def drop_http(running: Deployment, reference: Reference, seconds: float) -> None:
    """An HTTP client that disconnects in mid-stream."""
    body = {"prompt": list(reference.prompt), "stream": True, **ENDLESS}
    async with httpx.AsyncClient(base_url=running.http, timeout=300) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read_events(client, body), seconds)


async def read_events(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    """Read a stream of completions to its end."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            pass


async def stay_grpc(running: Deployment, reference: Reference) -> bool:
    """A gRPC client that reads to the end. Returns whether its comparison ended at a tie."""
    async with AsyncClient(running.grpc) as client:
        stream = client.stream(reference.prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        tokens: list[int] = []
        async for chunk in stream:
            assert chunk.offset == len(tokens)
            tokens += chunk.token_ids
        return reference.judge(tokens)


async def stay_http(running: Deployment, reference: Reference) -> bool:
    """An HTTP client that waits for the whole text. Returns whether the text differs at a tie."""
    body = {"prompt": list(reference.prompt), "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=running.http, timeout=300) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == NEW_TOKENS
        async with AsyncClient(running.grpc) as quire:
            expected = await quire.detokenize([*reference.prompt, *reference.tokens])
            prompt = await quire.detokenize(reference.prompt)
        if answer["choices"][0]["text"] == expected[len(prompt) :]:
            return False
        assert reference.ties, "the text differs, and there is no tie"
        return True


async def test_survivors_are_complete_and_right_and_all_blocks_come_back(
    shallow_model: object, shallow_judged: list[Reference]
) -> None:
    rng, untied = random.Random(1), [one for one in shallow_judged if not one.ties]
    leavers: list[Leave] = [break_stream, cancel_by_name, drop_http]
    with deployment(dtype="float32", num_blocks=400) as running:
        staying = [
            asyncio.create_task((stay_grpc if i % 2 else stay_http)(running, untied[(5 * i) % len(untied)]))
            for i in range(32)
        ]
        leaving = [
            asyncio.create_task(leavers[i % 3](running, rng.choice(untied), rng.uniform(0.05, 4))) for i in range(32)
        ]
        await asyncio.gather(*leaving)
        assert not any(await asyncio.gather(*staying))
        blocks = await running.rest()
        assert blocks["free"] + blocks["cached"] == 400
