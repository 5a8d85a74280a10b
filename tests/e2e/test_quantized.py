"""A file that `quire quantize` wrote, served: with prefixes, beams and a crowd, also when its worker is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment import Deployment, deployment
from quire_client import AsyncClient
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import Driver, make_runner
from worker_svc.compressed_writer import scheme_named
from worker_svc.quantize import quantize_model

SHARED = [7 * place % 250 + 1 for place in range(40)]
PROMPTS = [[*SHARED[: 20 * (place % 3)], *range(1 + place, 12 + 2 * place)] for place in range(12)]
NUM_TOKENS = 400  # takes about a second


@pytest.fixture(scope="module")
def quantized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("quantized") / "w4a16"
    quantize_model(tiny_model, target, scheme_named("w4a16", 32), lambda line: None)
    return target


@pytest.fixture(scope="module")
def expected(quantized: Path) -> list[list[int]]:
    """Greedy tokens of each prompt alone, computed here."""
    runner = make_runner(quantized, "compiled", weights=MatrixFormat.W4A16)
    return [Driver(runner).generate([prompt], NUM_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def running(quantized: Path) -> Iterator[Deployment]:
    with deployment(model=str(quantized), dtype="float32", quantization="w4a16", deterministic=1) as started:
        yield started


async def ask(client: AsyncClient, prompt: list[int]) -> list[int]:
    answer = await client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return list(answer.token_ids)


async def beams(client: AsyncClient) -> list[tuple[int, ...]]:
    found = await client.generate(PROMPTS[5], max_tokens=30, n=2, beam_width=3)
    return [one.token_ids for one in found.completions]


async def test_a_crowd_with_beams_whose_worker_is_killed(running: Deployment, expected: list[list[int]]) -> None:
    async with AsyncClient(running.grpc) as client:
        assert await ask(client, PROMPTS[0]) == expected[0]
        alone = await beams(client)
        asked = [asyncio.create_task(ask(client, prompt)) for prompt in PROMPTS]
        searched = asyncio.create_task(beams(client))
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in asked)
        running.kill("worker")
        assert await asyncio.gather(*asked) == expected
        assert await searched == alone
    assert len(alone) == 2
