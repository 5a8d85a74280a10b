"""An LLM and an embedding model in one deployment: floods of one leave the other usable, and limits of keys hold for
both. `tests.acceptance.mixed_loads` measures it with real models.
"""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from transformers import LlamaConfig

from bert_models import save_bert
from deployment import Deployment, deployment
from llama_models import SIZES, save_servable
from quire_client.bench.latency import percentile
from tests.acceptance import mixed_limits
from tests.acceptance.flood import KEY_FILE
from tests.acceptance.mixed_loads import Measurement, MixedTraffic
from tiny_model import tiny_tokenizer

TIMES = 10
"""That calls may take as long beside a flood: the machine may be busy with other tests."""
SECONDS = 1.0  # that they may take in any case


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("mixed-loads")
    (folder / "bert").mkdir()
    save_bert(folder / "bert")
    sizes = SIZES | {"vocab_size": tiny_tokenizer().get_vocab_size(), "max_position_embeddings": 8192}
    llm = save_servable(folder / "llm", LlamaConfig(**sizes), tiny_tokenizer())
    (folder / "models.toml").write_text(
        f'[[models]]\nmodel = "{llm}"\nserved_model_name = "llm"\n'
        f'[[models]]\nmodel = "{folder / "bert"}"\nserved_model_name = "{mixed_limits.MODEL_OF_TEXTS}"\n'
    )
    (folder / "keys.toml").write_text(KEY_FILE + mixed_limits.KEY_FILE)
    with deployment(
        models=str(folder / "models.toml"), api_keys=str(folder / "keys.toml"), num_threads=1, num_blocks=4000
    ) as running:
        yield running


async def test_limits_of_a_key_hold_for_generations_and_embeddings(running: Deployment) -> None:
    assert await mixed_limits.limit_errors(running.http, running.state["worker_metrics"][1]) == []
    await running.rest()


async def test_a_budget_is_spent_by_generations_and_embeddings_together(running: Deployment) -> None:
    assert mixed_limits.budget_errors(await mixed_limits.spend_budget(running.http, 10)) == []
    await running.rest()


async def test_a_flood_of_one_kind_leaves_the_other_usable(running: Deployment) -> None:
    async with asyncio.timeout(300), MixedTraffic(running, seed=1) as traffic:
        measurement = Measurement(running, 20, 10.0)
        await measurement.measure("alone", traffic, nullcontext())
        await measurement.measure("beside texts", traffic, traffic.flood_of_texts(8))
        await measurement.measure("beside jobs", traffic, traffic.flood(16))
    alone = measurement.found.pop("alone")
    for found in measurement.found.values():
        for times, usual in ((found.chats, alone.chats), (found.texts, alone.texts)):
            assert percentile(times, 90) <= TIMES * percentile(usual, 90) + SECONDS
    await running.rest()
