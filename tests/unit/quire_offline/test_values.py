"""Embeddings, classifications and scores: those of transformers, for every kind of parameter, and what is refused."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import BertModel

from bert_models import CONTEXT, hidden_states, random_prompts, save_bert, save_cross_encoder
from offline_model import SMALL, save_offline_model
from quire_offline import LLM, AsyncLLM, PoolingParams, QuireError
from quire_offline.offline_values import MAX_PAIRS
from reranker_files import write_reranker_files
from tiny_model import tiny_tokenizer

ENCODER: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
TEXTS = ["hello world", "a b c d", "hello"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    directory = tmp_path_factory.mktemp("bert")
    return directory, save_bert(directory)


@pytest.fixture(scope="module")
def encoder(bert: tuple[Path, BertModel]) -> Iterator[LLM]:
    with LLM(str(bert[0]), **ENCODER) as llm:
        yield llm


@pytest.fixture(scope="module")
def token_ids(bert: tuple[Path, BertModel]) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(bert[0] / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return encode


def expected(bert: tuple[Path, BertModel], prompt: Sequence[int]) -> list[float]:
    """As sentence-transformers computes it for this model."""
    vector: list[float] = normalize(hidden_states(bert[1], prompt).mean(0), dim=0).tolist()
    return vector


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of unit vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True))


# Embeddings.


def test_vectors_are_those_of_transformers(encoder: LLM, bert: tuple[Path, BertModel]) -> None:
    prompts = random_prompts([1, 2, 15, 16, 17, 33, CONTEXT - 1, CONTEXT] * 12)
    outputs = encoder.embed(prompts)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == len(prompts)
    for output in outputs:
        assert output.outputs.embedding == pytest.approx(expected(bert, output.prompt_token_ids), abs=1e-4)
        assert (output.outputs.hidden_size, output.finished) == (48, True)


def test_prompts_are_texts_objects_and_tokens(encoder: LLM, token_ids: Callable[[str], list[int]]) -> None:
    ids = token_ids("hello world")
    given: list[Any] = ["hello world", {"prompt": "hello world"}, {"prompt_token_ids": ids}, ids]
    vectors = [output.outputs.embedding for output in encoder.embed(given)]
    assert len(set(map(tuple, vectors))) == 1
    (alone,) = encoder.embed(ids)
    assert alone.outputs.embedding == pytest.approx(vectors[0], abs=1e-5)
    assert alone.prompt_token_ids == ids
    assert encoder.embed([]) == []


def test_parameters_are_of_all_prompts_or_of_each(encoder: LLM) -> None:
    short = PoolingParams(dimensions=5, use_activation=False)
    (whole,) = encoder.embed("hello", pooling_params=PoolingParams(normalize=False))
    one, other = encoder.embed(["hello"] * 2, pooling_params=[short, PoolingParams()])
    assert one.outputs.embedding == pytest.approx(whole.outputs.embedding[:5], abs=1e-5)
    assert math.hypot(*other.outputs.embedding) == pytest.approx(1, abs=1e-5)
    assert [len(output.outputs.embedding) for output in encoder.embed(["a"] * 3, pooling_params=short)] == [5] * 3
    with pytest.raises(ValueError, match="there are 1 pooling_params for 2 prompts"):
        encoder.embed(["a", "b"], pooling_params=[short])


def test_long_texts_are_cut_where_that_is_requested(encoder: LLM) -> None:
    long = " ".join(["hello"] * 2 * CONTEXT)
    with pytest.raises(QuireError) as raised:
        encoder.embed(["a", long])
    assert (raised.value.reason, raised.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "input")
    assert raised.value.__notes__ == ["prompt 1 of 2"]
    (output,) = encoder.embed(long, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == CONTEXT


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (PoolingParams(dimensions=0), "dimensions"),
        (PoolingParams(dimensions=49), "dimensions"),
        (PoolingParams(pooling="max"), "pooling"),
        (PoolingParams(use_activation=True, normalize=False), "use_activation"),
        (PoolingParams(truncate_prompt_tokens=CONTEXT + 1), "truncate_prompt_tokens"),
        (PoolingParams(max_tokens_per_doc=3), "max_tokens_per_doc"),
    ],
)
def test_a_parameter_of_embeddings_that_is_not_valid_is_named(params: PoolingParams, field: str, encoder: LLM) -> None:
    with pytest.raises(QuireError) as raised:
        encoder.embed(TEXTS, pooling_params=params)
    assert raised.value.field == field


def test_an_invalid_prompt_cancels_the_others(encoder: LLM) -> None:
    with pytest.raises(QuireError, match="must not be empty") as raised:
        encoder.embed([*TEXTS * 20, "", *TEXTS])
    assert (raised.value.field, raised.value.__notes__) == ("input", ["prompt 60 of 64"])
    assert len(encoder.embed(TEXTS)) == 3


def test_a_note_names_the_prompt_that_asks_for_too_many_dimensions(encoder: LLM) -> None:
    # Only the result shows how many there are.
    with pytest.raises(QuireError, match="must be at most") as raised:
        encoder.embed(["a", "b"], pooling_params=[PoolingParams(dimensions=3), PoolingParams(dimensions=999)])
    assert (raised.value.field, raised.value.__notes__) == ("dimensions", ["prompt 1 of 2"])


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="no option dimension; did you mean dimensions"):
        PoolingParams(dimension=3)
    assert repr(PoolingParams(dimensions=3)) == "PoolingParams(dimensions=3)"


# Scores.


def test_scores_are_the_cosines_of_vectors(encoder: LLM, bert: tuple[Path, BertModel], token_ids: Any) -> None:
    vectors = [expected(bert, token_ids(text)) for text in TEXTS]
    outputs = encoder.score(TEXTS[0], TEXTS)
    assert [output.outputs.score for output in outputs] == pytest.approx(
        [cosine(vectors[0], vector) for vector in vectors], abs=1e-4
    )
    assert outputs[1].prompt_token_ids == [*token_ids(TEXTS[0]), *token_ids(TEXTS[1])]
    pairs = encoder.score(TEXTS, TEXTS[::-1])
    assert pairs[0].outputs.score == pytest.approx(cosine(vectors[0], vectors[2]), abs=1e-4)
    assert pairs[1].outputs.score == pytest.approx(1, abs=1e-5)
    (one,) = encoder.score({"text": TEXTS[0]}, TEXTS[1])
    assert one.outputs.score == pytest.approx(outputs[1].outputs.score, abs=1e-5)


def test_a_call_may_have_many_pairs(encoder: LLM) -> None:
    texts = [" ".join(["a"] * (1 + number % 9)) for number in range(2 * MAX_PAIRS + 5)]
    of_each = {text: encoder.score("hello", text)[0].outputs.score for text in set(texts)}
    outputs = encoder.score("hello", texts)
    assert [one.outputs.score for one in outputs] == pytest.approx([of_each[text] for text in texts], abs=1e-4)
    assert len({one.request_id for one in outputs}) == len(texts)
    assert [one.outputs.score for one in encoder.score(texts, texts)] == pytest.approx([1.0] * len(texts), abs=1e-4)


@pytest.mark.parametrize(
    ("text_1", "text_2", "params", "field"),
    [
        ("a", ["b"] * (MAX_PAIRS + 7) + [""], {}, f"text_2[{MAX_PAIRS + 7}]"),
        (["b"] * (MAX_PAIRS + 7) + [{"text": ""}], ["a"] * (MAX_PAIRS + 8), {}, f"text_1[{MAX_PAIRS + 7}].text"),
        ("a", [*["b"] * MAX_PAIRS, 5], {}, f"text_2[{MAX_PAIRS}]"),
        (["a", "b"], ["c"] * 3, {}, "text_1"),
        ("a", [], {}, "text_2"),
        ("a", "b", {"dimensions": 3}, "dimensions"),
        ("a", "b", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("", "b", {}, "text_1"),
    ],
)
def test_what_is_not_valid_in_a_call_for_scores_is_named(
    text_1: Any, text_2: Any, params: dict[str, Any], field: str, encoder: LLM
) -> None:
    with pytest.raises(QuireError) as raised:
        encoder.score(text_1, text_2, pooling_params=PoolingParams(**params))
    assert raised.value.field == field
    assert not hasattr(raised.value, "__notes__")


async def test_a_call_may_have_an_instruction(tmp_path: Path, encoder: LLM) -> None:
    save_offline_model(tmp_path)
    write_reranker_files(tmp_path, 5, 6)
    async with AsyncLLM(str(tmp_path), **ENCODER) as llm:
        (output,) = await llm.score("who?", "me", instruction="Find.")
    prompt = tiny_tokenizer().decode(output.prompt_token_ids)
    assert prompt == "Task: Find.\nQuery: who?\nDocument: meAnswer:"
    with pytest.raises(QuireError) as raised:
        encoder.score("a", "b", instruction="Find.")
    assert (raised.value.reason, raised.value.field) == ("FEATURE_UNSUPPORTED", "instruction")


# Classifications.


LABELS = ("sad", "fine", "glad")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("classifier")
    return directory, save_cross_encoder(directory, id2label=dict(enumerate(LABELS)), num_labels=len(LABELS))


async def test_numbers_of_labels_are_those_of_transformers(
    classifier: tuple[Path, Any], token_ids: Callable[[str], list[int]]
) -> None:
    directory, model = classifier
    with torch.inference_mode():
        logits = [model(torch.tensor([token_ids(text)])).logits[0] for text in TEXTS]
    with LLM(str(directory), **ENCODER) as llm:
        assert llm.labels == LABELS
        outputs = llm.classify(TEXTS)
        assert [one.outputs.probs for one in outputs] == [
            pytest.approx(one.softmax(0).tolist(), abs=1e-4) for one in logits
        ]
        assert [(one.prompt_token_ids, one.outputs.num_classes) for one in outputs] == [
            (token_ids(text), len(LABELS)) for text in TEXTS
        ]
        (raw,) = llm.classify(token_ids(TEXTS[0]), pooling_params=PoolingParams(raw_scores=True))
        assert raw.outputs.probs == pytest.approx(logits[0].tolist(), abs=1e-4)
        with pytest.raises(QuireError) as raised:
            llm.classify("a", pooling_params=PoolingParams(dimensions=2))
        assert (raised.value.reason, raised.value.field) == ("FEATURE_UNSUPPORTED", "dimensions")
        with pytest.raises(QuireError, match="has 3 labels"):
            llm.score("a", "b")
    async with AsyncLLM(str(directory), **ENCODER) as asynchronous:
        (one,) = await asynchronous.classify(TEXTS[1])
    assert one.outputs.probs == pytest.approx(outputs[1].outputs.probs, abs=1e-5)


# Models.


def test_a_model_is_asked_for_what_it_computes(llm: LLM, encoder: LLM) -> None:
    for call in (
        lambda: llm.embed("hello"),
        lambda: llm.score("a", "b"),
        lambda: encoder.generate("hello"),
    ):
        with pytest.raises(QuireError, match="model: computes no") as raised:
            call()
        assert raised.value.reason == "FEATURE_UNSUPPORTED"
    for one in (llm, encoder):
        with pytest.raises(QuireError, match="has no labels") as raised:
            one.classify("hello")
        assert (raised.value.reason, raised.value.field) == ("FEATURE_UNSUPPORTED", "model")
    assert len(llm.generate("hello")) == len(encoder.embed("hello")) == 1


def test_the_bar_counts_prompts_and_pairs(encoder: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    encoder.embed(TEXTS, use_tqdm=True)
    encoder.score("a", ["b"] * (MAX_PAIRS + 1), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert f"{MAX_PAIRS + 1}/{MAX_PAIRS + 1}" in shown
    assert "output" not in shown


# asyncio.


async def test_calls_of_asyncio_run_at_once_and_are_cancelled(bert: tuple[Path, BertModel], encoder: LLM) -> None:
    async with AsyncLLM(str(bert[0]), **ENCODER) as llm:
        calls = [llm.embed(TEXTS), llm.embed("hello"), *(llm.embed(TEXTS) for _ in range(5))]
        answers = await asyncio.gather(*calls)
        scores = await llm.score("hello", TEXTS)
        assert [one.outputs.score for one in scores] == pytest.approx(
            [one.outputs.score for one in encoder.score("hello", TEXTS)], abs=1e-5
        )
        assert answers[1][0].outputs.embedding == pytest.approx(answers[0][2].outputs.embedding, abs=1e-5)
        long = asyncio.create_task(llm.embed(random_prompts([CONTEXT] * 2_000)))
        core = next(iter(llm._thread.engine._scheduler.models)).core
        async with asyncio.timeout(200):
            while not core.num_running:
                await asyncio.sleep(0.01)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            while core.num_running or core.num_queued:
                await asyncio.sleep(0.01)
        with pytest.raises(QuireError) as raised:
            await llm.embed(["a", ""])
        assert raised.value.field == "input"
        running = asyncio.create_task(llm.embed(random_prompts([CONTEXT] * 2_000)))
        await asyncio.sleep(0.05)
    with pytest.raises(QuireError, match="closed"):
        await running


async def test_calls_of_asyncio_are_aborted_by_their_id(bert: tuple[Path, BertModel]) -> None:
    async with AsyncLLM(str(bert[0]), **ENCODER) as llm:
        core = next(iter(llm._thread.engine._scheduler.models)).core
        texts = [f"hello {number}" for number in range(5_000)]
        for call in (llm.embed(texts, request_id="mine"), llm.score("hello", texts, request_id="mine")):
            long = asyncio.create_task(call)
            async with asyncio.timeout(200):
                while not core.num_running:
                    await asyncio.sleep(0.01)
                with pytest.raises(QuireError) as raised:
                    await llm.embed("hello", request_id="mine")
                assert raised.value.field == "request_id"
                await llm.abort(["mine", "unknown"])
                with pytest.raises(QuireError, match="the request was aborted"):
                    await long
                while core.num_running or core.num_queued:
                    await asyncio.sleep(0.01)
        assert len(await llm.embed(["hello", "world"], request_id="mine")) == 2


async def test_a_chat_of_asyncio_is_answered_as_a_chat(model: Path, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (expected,) = llm.chat(messages)
    async with AsyncLLM(str(model), **SMALL, num_blocks=32) as served:
        outputs = [output async for output in served.chat(messages, request_id="mine")]
        assert (outputs[-1].request_id, outputs[-1].finished) == ("mine", True)
        assert outputs[-1].prompt == expected.prompt
        with pytest.raises(QuireError) as raised:
            served.chat(messages, tool_choise="auto")
        assert raised.value.field == "tool_choise"
