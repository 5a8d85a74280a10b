"""The shallow model and two small random ones of other architectures, in one deployment."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import MistralConfig, Qwen3Config

from deployment import Deployment, deployment
from llama_models import SIZES, generate, prompts, save_servable
from quire_client import AsyncClient, AsyncStream
from svc_common.models import DEFAULT_MODEL
from tiny_model import other_tokenizer, tiny_tokenizer

TIMEOUT = 120  # seconds
NAMES = {DEFAULT_MODEL: "default", "qwen": "q", "mistral": "owner/m"}
"""Each model's name and alias."""
NUM_TOKENS = 12
LENGTHS = {DEFAULT_MODEL: 120, "qwen": 1000, "mistral": 2000}
"""Number of tokens of long streams, so that those of all models take seconds."""
(PROMPT,) = prompts(40)


@pytest.fixture(scope="module")
def directories(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of the models, by their names."""
    root = tmp_path_factory.mktemp("models")
    sizes = SIZES | {"max_position_embeddings": 4096}
    tiny, other = tiny_tokenizer(), other_tokenizer()
    return {
        DEFAULT_MODEL: shallow_model,
        "qwen": save_servable(root / "qwen", Qwen3Config(**sizes | {"vocab_size": tiny.get_vocab_size()}), tiny),
        "mistral": save_servable(
            root / "mistral",
            MistralConfig(
                **sizes | {"vocab_size": other.get_vocab_size(), "num_hidden_layers": 3}, sliding_window=None
            ),
            other,
        ),
    }


@pytest.fixture(scope="module")
def running(directories: dict[str, Path]) -> Iterator[Deployment]:
    """All three with one gateway and one scheduler."""
    file = directories["qwen"].parent / "models.toml"
    file.write_text(
        f"""
        [[models]]
        served_model_name = ["{DEFAULT_MODEL}", "{NAMES[DEFAULT_MODEL]}"]
        [[models]]
        model = "qwen"
        served_model_name = "qwen, {NAMES["qwen"]}"
        [[models]]
        model = "mistral"
        served_model_name = ["mistral", "{NAMES["mistral"]}"]
        """
    )
    # Deterministic, so that long streams can be compared to the last token, also after recomputation.
    with deployment(models=str(file), num_blocks=150, num_threads=1, deterministic=1, dtype="float32") as running:
        yield running


@pytest.fixture
async def client(running: Deployment) -> Any:
    """A client, once all models are ready."""
    async with AsyncClient(running.grpc) as client:
        async with asyncio.timeout(TIMEOUT):
            while {model.name for model in await client.models()} != set(NAMES):
                await asyncio.sleep(0.05)
        yield client


async def test_each_model_answers_as_transformers_do_and_no_prefix_crosses(
    client: AsyncClient, running: Deployment, directories: dict[str, Path]
) -> None:
    for name, alias in NAMES.items():
        (expected,) = generate(directories[name], [PROMPT], NUM_TOKENS)
        text = Tokenizer.from_file(str(directories[name] / "tokenizer.json")).decode(expected)
        # The other models have had the same prompt before: only blocks of this model are reused.
        for asked, has_prefix in ((name, False), (alias, True)):
            answer = await client.generate(PROMPT, model=asked, max_tokens=NUM_TOKENS, temperature=0)
            assert (answer.acceptance.model, list(answer.token_ids)) == (name, expected)
            assert answer.text == text
            assert (answer.usage.cached_tokens > 0) == has_prefix
    unnamed = await client.generate(PROMPT, max_tokens=1, temperature=0)
    assert unnamed.acceptance.model == DEFAULT_MODEL

    def cards() -> list[tuple[str, str]]:
        with urllib.request.urlopen(f"{running.http}/v1/models", timeout=60) as response:
            return [(card["id"], card["root"]) for card in json.load(response)["data"]]

    assert await asyncio.to_thread(cards) == [(each, name) for name, alias in NAMES.items() for each in (name, alias)]


def stream(client: AsyncClient, name: str) -> AsyncStream:
    return client.stream(PROMPT, model=name, max_tokens=LENGTHS[name], temperature=0, ignore_eos=True)


async def test_a_model_without_workers_leaves_the_others_alone_and_goes_on_when_one_is_back(
    client: AsyncClient, running: Deployment
) -> None:
    whole = await asyncio.gather(*(stream(client, name).collect() for name in NAMES))
    expected = {name: list(answer.token_ids) for name, answer in zip(NAMES, whole, strict=True)}
    begun = {name: asyncio.Event() for name in NAMES}
    received: dict[str, list[int]] = {name: [] for name in NAMES}

    async def read(name: str) -> None:
        async for chunk in stream(client, name):
            received[name] += chunk.token_ids
            begun[name].set()

    async with asyncio.timeout(TIMEOUT), asyncio.TaskGroup() as readers:
        reading = {name: readers.create_task(read(name)) for name in NAMES}
        await asyncio.gather(*(event.wait() for event in begun.values()))
        running.kill("worker-mistral-0")
        assert len(received["mistral"]) < LENGTHS["mistral"], "the stream was over before its worker was killed"
        await asyncio.wait([reading[DEFAULT_MODEL], reading["qwen"]])
        answer = await client.generate(PROMPT, model="qwen", max_tokens=NUM_TOKENS, temperature=0)
        assert list(answer.token_ids) == expected["qwen"][:NUM_TOKENS]
    assert received == expected
    restarts = {name: role["restarts"] for name, role in running.state["roles"].items() if role["restarts"]}
    assert restarts == {"worker-mistral-0": 1}
