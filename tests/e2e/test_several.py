"""Two gateways and two workers: each gateway serves, and finds requests of the other one by name."""

import asyncio
from pathlib import Path

import pytest

from deployment import deployment
from quire_client import AsyncClient, QuireError


async def test_two_gateways_share_two_workers(tiny_model: Path) -> None:
    with deployment(model=str(tiny_model), gateways=2, workers=2, num_blocks=200, dtype="float32") as running:
        first, second = running.state["grpc"]
        async with AsyncClient(first) as here, AsyncClient(second) as there:
            async with asyncio.timeout(120):
                while running.metrics()["quire_workers_ready"] < 2:
                    await asyncio.sleep(0.05)
            answers = await asyncio.gather(
                *(
                    client.generate([5, 6, 7, i], max_tokens=40, temperature=0, ignore_eos=True)
                    for i in range(8)
                    for client in (here, there)
                )
            )
            assert all(a.token_ids == b.token_ids for a, b in zip(answers[::2], answers[1::2], strict=True))
            named = asyncio.create_task(here.generate("Once", max_tokens=3000, ignore_eos=True, request_id="mine"))
            async with asyncio.timeout(120):
                while not running.metrics()["quire_sequences_running"]:
                    await asyncio.sleep(0.05)
            with pytest.raises(QuireError) as raised:
                await there.generate("Twice", max_tokens=4, request_id="mine")
            assert raised.value.reason == "IDEMPOTENCY_KEY_REUSED"
            await there.cancel("mine")
            with pytest.raises(QuireError) as raised:
                await named
            assert raised.value.reason == "CANCELLED"
        blocks = await running.rest()
        assert blocks["free"] + blocks["cached"] == 400
