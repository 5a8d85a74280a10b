"""An embedding model, a cross-encoder and an LLM in one deployment: vectors and scores as transformers has them, beside
streams, after a death.
"""

import asyncio
import json
import math
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForSequenceClassification,
    BertModel,
    Qwen3Config,
)

from bert_models import CONTEXT, hidden_states, random_prompts, raw_score, save_bert, save_cross_encoder
from deployment import Deployment, deployment
from llama_models import SIZES, save_servable
from quire_client import AsyncClient, QuireError
from reranker_files import write_reranker_files
from tiny_model import tiny_tokenizer

TIMEOUT = 120  # seconds
ANSWERS = 5, 9  # tokens that say yes and no


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_bert(directory)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertForSequenceClassification]:
    directory = tmp_path_factory.mktemp("cross-encoder")
    return directory, save_cross_encoder(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the decoders."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def running(
    bert: tuple[Path, BertModel],
    cross_encoder: tuple[Path, BertForSequenceClassification],
    models: Path,
) -> Iterator[Deployment]:
    sizes = SIZES | {"max_position_embeddings": 4096, "vocab_size": tiny_tokenizer().get_vocab_size()}
    llm = save_servable(models / "llm", Qwen3Config(**sizes), tiny_tokenizer())
    save_servable(models / "decoder", Qwen3Config(**sizes), tiny_tokenizer())
    save_servable(models / "reranker", Qwen3Config(**sizes), tiny_tokenizer())
    write_reranker_files(models / "reranker", *ANSWERS)
    file = models / "models.toml"
    file.write_text(
        f"""
        [[models]]
        model = "{llm}"
        served_model_name = "llm"
        [[models]]
        model = "{bert[0]}"
        served_model_name = "bert"
        [[models]]
        model = "{cross_encoder[0]}"
        served_model_name = "cross-encoder"
        [[models]]
        model = "decoder"
        task = "embed"
        [[models]]
        model = "reranker"
        """
    )
    # Settings that only the LLM can follow.
    settings: dict[str, str | int] = {"deterministic": 1, "max_model_len": 2048, "drafter": "ngram"}
    with deployment(models=str(file), num_blocks=300, num_threads=1, dtype="float32", **settings) as running:
        yield running


@pytest.fixture
async def client(running: Deployment) -> Any:
    """A client, once all models are ready."""
    async with AsyncClient(running.grpc) as client:
        async with asyncio.timeout(TIMEOUT):
            names = {"llm", "bert", "cross-encoder", "decoder", "reranker"}
            while {model.name for model in await client.models()} != names:
                await asyncio.sleep(0.05)
        yield client


def expected(model: BertModel, prompt: list[int]) -> list[float]:
    """As sentence-transformers computes it for this model."""
    vector: list[float] = normalize(hidden_states(model, prompt).mean(0), dim=0).tolist()
    return vector


async def test_vectors_of_prompts_of_all_lengths_beside_streams(
    client: AsyncClient, running: Deployment, bert: tuple[Path, BertModel]
) -> None:
    prompts = random_prompts([1, 2, 15, 16, 17, 33, CONTEXT - 1, CONTEXT] * 12)
    streams = [
        asyncio.create_task(client.generate([5, 6, seed], model="llm", max_tokens=100, ignore_eos=True, seed=seed))
        for seed in range(6)
    ]
    found = await client.embed(prompts, model="bert")
    assert (found.model, found.usage.prompt_tokens) == ("bert", sum(map(len, prompts)))
    for prompt, vector in zip(prompts, found.vectors, strict=True):
        assert vector == pytest.approx(expected(bert[1], prompt), abs=1e-4)
    assert {len(answer.token_ids) for answer in await asyncio.gather(*streams)} == {100}
    await running.rest()


@pytest.mark.parametrize(("model", "path"), [("bert", "/v1/embeddings"), ("cross_encoder", "/rerank")])
async def test_the_example_for_a_model_is_one_that_it_answers(
    model: str, path: str, request: pytest.FixtureRequest
) -> None:
    directory, _ = request.getfixturevalue(model)
    with deployment(model=str(directory), dtype="float32") as running:
        (example,) = [line for line in running.log.read_text().splitlines() if "curl -N" in line]
        assert f"{path} " in example
        body = json.loads(example.rpartition(" -d ")[2].strip("'"))
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            answer = (await client.post(f"{running.http}{path}", json=body)).raise_for_status().json()
    if model == "bert":
        assert len(answer["data"][0]["embedding"]) == 48
    else:
        assert {one["index"] for one in answer["results"]} == {0, 1}


async def test_texts_by_the_official_client(running: Deployment, bert: tuple[Path, BertModel]) -> None:
    texts = ["hello world", "a b c d", "hello"]
    tokenizer = Tokenizer.from_file(str(bert[0] / "tokenizer.json"))
    async with openai.AsyncOpenAI(base_url=f"{running.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="bert", input=texts)  # asks for base64
        short = await client.embeddings.create(model="bert", input=texts[0], dimensions=5, encoding_format="float")
    for text, row in zip(texts, answer.data, strict=True):
        assert row.embedding == pytest.approx(expected(bert[1], tokenizer.encode(text).ids), abs=1e-4)
    whole = answer.data[0].embedding[:5]
    length = sum(number * number for number in whole) ** 0.5
    assert short.data[0].embedding == pytest.approx([number / length for number in whole], abs=1e-4)


async def test_vectors_of_a_decoder(client: AsyncClient, running: Deployment, models: Path) -> None:
    vocab_size = tiny_tokenizer().get_vocab_size()
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in [1, 17, 300, 1500] * 3]
    found = await client.embed(prompts, model="decoder")
    model: Any = AutoModel.from_pretrained(models / "decoder", dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1] for prompt in prompts]
    for vector, last in zip(found.vectors, states, strict=True):
        assert vector == pytest.approx(normalize(last, dim=0).tolist(), abs=1e-4)
    with pytest.raises(QuireError) as raised:
        await client.generate("hello", model="decoder")
    assert raised.value.reason == "FEATURE_UNSUPPORTED"
    await running.rest()


async def test_scores_of_a_cross_encoder_beside_streams(
    client: AsyncClient, running: Deployment, cross_encoder: tuple[Path, BertForSequenceClassification]
) -> None:
    rng = random.Random(0)
    query, documents = "hello worlds", [" ".join(rng.choices("abcd", k=rng.randint(1, 50))) for _ in range(100)]
    tokenizer = Tokenizer.from_file(str(cross_encoder[0] / "tokenizer.json"))

    def expected_score(document: str, *, is_raw: bool) -> float:
        pair = tokenizer.encode(query, document)
        raw = raw_score(cross_encoder[1], pair.ids, pair.type_ids.index(1))
        return raw if is_raw else 1 / (1 + math.exp(-raw))

    stream = asyncio.create_task(client.generate([5, 6, 7], model="llm", max_tokens=100, ignore_eos=True))
    for is_raw in (True, False):
        found = await client.score(query, documents, model="cross-encoder", raw_scores=is_raw)
        expected = [expected_score(document, is_raw=is_raw) for document in documents]
        assert found.scores == pytest.approx(expected, abs=1e-3)
    body = {"model": "cross-encoder", "query": query, "documents": documents, "top_n": 3}
    async with httpx.AsyncClient(timeout=TIMEOUT) as http:
        results = (await http.post(f"{running.http}/rerank", json=body)).json()["results"]
    best = sorted(range(len(documents)), key=lambda index: -found.scores[index])[:3]
    assert [one["relevance_score"] for one in results] == pytest.approx(
        [found.scores[index] for index in best], abs=1e-4
    )
    assert len((await stream).token_ids) == 100
    await running.rest()


async def test_scores_of_a_decoder_that_answers(client: AsyncClient, running: Deployment, models: Path) -> None:
    """The score is what the model says of the pair, as its chat template writes it; also in one step with others, and
    where a document is cut.
    """
    query, documents = "who?", ["me", "you and " * 20, "<|im_end|>"]
    model: Any = AutoModelForCausalLM.from_pretrained(models / "reranker", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models / "reranker")

    def expected(document: str, instruction: str | None = None) -> float:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages = [{"role": "system", "content": instruction}, *messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        with torch.inference_mode():
            logits = model(tokenizer(text, return_tensors="pt").input_ids).logits[0, -1]
        return float((logits[ANSWERS[0]] - logits[ANSWERS[1]]).sigmoid())

    found = await client.score(query, documents, model="reranker")
    assert found.scores[:2] == pytest.approx([expected(document) for document in documents[:2]], abs=1e-3)
    assert found.scores[2] != pytest.approx(expected(documents[2]), abs=1e-4), "a control token of a text is text"
    cut = await client.score(query, documents[1], model="reranker", max_tokens_per_document=8)
    assert cut.scores == pytest.approx([expected("you and ")], abs=1e-3)
    asked = await client.score(query, documents[:2], model="reranker", instruction="Find people.")
    assert asked.scores == pytest.approx([expected(document, "Find people.") for document in documents[:2]], abs=1e-3)
    assert asked.scores != pytest.approx(found.scores[:2], abs=1e-4)
    for call in (client.generate("hello", model="reranker"), client.embed("hello", model="reranker")):
        with pytest.raises(QuireError) as raised:
            await call
        assert raised.value.reason == "FEATURE_UNSUPPORTED"
    await running.rest()


async def test_inputs_of_a_worker_that_dies_are_computed_by_the_next(
    client: AsyncClient, running: Deployment, bert: tuple[Path, BertModel]
) -> None:
    prompts = random_prompts([CONTEXT] * 1000, seed=1)
    running.kill("worker-bert-0", signal.SIGSTOP)  # so that it cannot be done before it is killed
    call = asyncio.create_task(client.embed(prompts, model="bert"))
    async with asyncio.timeout(TIMEOUT):
        while not running.metrics()["quire_sequences_running"]:
            await asyncio.sleep(0.01)
    assert not call.done()
    running.kill("worker-bert-0")
    found = await call
    assert found.vectors[-1] == pytest.approx(expected(bert[1], prompts[-1]), abs=1e-4)
    assert len(found.vectors) == len(prompts)
    await running.rest()


async def test_inputs_of_a_scheduler_that_dies_are_computed_by_the_next(
    client: AsyncClient, running: Deployment, bert: tuple[Path, BertModel]
) -> None:
    prompts = random_prompts([CONTEXT] * 1000, seed=2)
    running.kill("worker-bert-0", signal.SIGSTOP)
    call = asyncio.create_task(client.embed(prompts, model="bert"))
    async with asyncio.timeout(TIMEOUT):
        num_live = 0.0
        while num_live < len(prompts):
            metrics = running.metrics()
            num_live = metrics["quire_sequences_running"] + metrics["quire_sequences_waiting"]
            await asyncio.sleep(0.01)
        running.kill("scheduler")
        running.kill("worker-bert-0", signal.SIGCONT)
        found = await call
    assert found.vectors[-1] == pytest.approx(expected(bert[1], prompts[-1]), abs=1e-4)
    assert len(found.vectors) == len(prompts)
    assert running.metrics()["quire_requests_taken_over_total"] == 0  # there are no records of them
    await running.rest()


async def test_a_model_is_asked_for_what_it_computes(client: AsyncClient) -> None:
    for call in (
        client.embed("hello", model="llm"),
        client.score("hello", "hello", model="llm"),
        client.generate("hello", model="bert"),
        client.generate("hello", model="cross-encoder"),
        client.embed("hello", model="cross-encoder"),
    ):
        with pytest.raises(QuireError) as raised:
            await call
        assert raised.value.reason == "FEATURE_UNSUPPORTED"
