"""Calls for scores of both protocols, validated by one validator: pairs for cross-encoders, texts for other models."""

import json
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from encoder_model import (
    CONTEXT_LENGTH,
    WORDS,
    bert_processor,
    encoder_tokenizer,
    ids,
    make_encoder_directory,
    template_processor,
)
from gateway_svc.embeddings import EmbeddingParams
from gateway_svc.field_paths import Field
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.scoring.models import ScoreBody
from gateway_svc.http_api.scoring.requests import read_score
from gateway_svc.retention import NONE
from gateway_svc.score_validation import validate_scores
from gateway_svc.scores import ScoreParams, UnvalidatedScores, ValidatedScores
from gateway_svc.tokenizer import ModelTokenizer, TextToEncode
from gateway_svc.validated_request import ModelInfo, TruncationSide
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason
from svc_common.model_tasks import ModelTask

MODEL = ModelInfo("encoder", CONTEXT_LENGTH, len(WORDS))
LONG = " ".join("abcd" * 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A tokenizer as in BERT."""
    return ModelTokenizer.load(make_encoder_directory(tmp_path_factory.mktemp("encoder")))


def of_grpc(**fields: Any) -> UnvalidatedScores:
    """A call from the wire."""
    return UnvalidatedScores.from_proto(api.ScoreRequest.FromString(api.ScoreRequest(**fields).SerializeToString()))


def of_http(**fields: Any) -> UnvalidatedScores:
    """A body."""
    return read_score(ScoreBody.read(parse_body(json.dumps(fields).encode())))


async def validated(
    unvalidated: UnvalidatedScores,
    tokenizer: ModelTokenizer,
    task: ModelTask = ModelTask.SCORE,
    model: ModelInfo = MODEL,
) -> ValidatedScores:
    pairs = tokenizer.pair_template if task is ModelTask.SCORE else None
    return await validate_scores(
        unvalidated, tokenizer, model, pairs, (), request_id="own-id", retention=unvalidated.retention, tenant="default"
    )


async def test_pairs_of_both_protocols_are_prompts_with_two_types_of_tokens(tokenizer: ModelTokenizer) -> None:
    texts: dict[str, Any] = {"queries": ["a b", "hello"], "documents": ["c", "worlds d"]}
    over_grpc = await validated(of_grpc(**texts), tokenizer)
    over_http = await validated(of_http(**texts), tokenizer)
    assert over_grpc.requests == over_http.requests
    assert [(one.prompt_token_ids, one.params) for one in over_grpc.requests] == [
        (ids("[CLS] a b [SEP] c [SEP]"), ScoreParams(4, is_raw=False)),
        (ids("[CLS] hello [SEP] world ##s d [SEP]"), ScoreParams(3, is_raw=False)),
    ]
    submit = over_http.requests[1].to_proto()
    assert submit.result.WhichOneof("kind") == "score"
    assert (submit.result.score.num_first_tokens, submit.result.score.is_raw) == (3, False)
    assert (submit.n, submit.max_tokens, submit.render_options.request_id) == (1, 0, "own-id")


async def test_options_of_both_protocols_are_the_schedulers(tokenizer: ModelTokenizer) -> None:
    (over_grpc,) = (
        await validated(
            of_grpc(queries=["a"], documents=["b"], raw_scores=True, priority=-3, retention={"none": {}}), tokenizer
        )
    ).requests
    body = {"queries": "a", "documents": "b", "use_activation": False, "priority": -3, "retention": "none"}
    (over_http,) = (await validated(of_http(**body), tokenizer)).requests
    assert over_grpc == over_http
    assert (over_grpc.priority, over_grpc.retention, over_grpc.params) == (-3, NONE, ScoreParams(3, is_raw=True))


def test_millions_of_texts_are_refused_before_they_are_read() -> None:
    many = api.ScoreRequest(queries=["a"], documents=[""] * 2_000_000)
    began = time.thread_time()
    with pytest.raises(QuireError, match="must hold 1 to 1024 texts"):
        UnvalidatedScores.from_proto(many)
    assert time.thread_time() - began < 0.05  # to name the fields of all takes five times as long


async def test_equal_pairs_are_one_request(tokenizer: ModelTokenizer) -> None:
    scores = await validated(of_http(queries="a", documents=["b", "a", "b", "c"]), tokenizer)
    assert [one.prompt_token_ids for one in scores.requests] == [
        ids(f"[CLS] a [SEP] {document} [SEP]") for document in ("b", "a", "c")
    ]
    assert list(scores.places) == [(0,), (1,), (0,), (2,)]
    assert scores.read([array("f", [number]) for number in (0.5, -1.0, 3.0)]) == [0.5, -1.0, 0.5, 3.0]


async def test_a_model_that_embeds_gets_each_text_once(tokenizer: ModelTokenizer) -> None:
    scores = await validated(of_http(queries="a", documents=["b", "a"]), tokenizer, ModelTask.EMBED)
    assert [(one.prompt_token_ids, one.params) for one in scores.requests] == [
        (ids("[CLS] a [SEP]"), EmbeddingParams()),
        (ids("[CLS] b [SEP]"), EmbeddingParams()),
    ]
    assert list(scores.places) == [(0, 1), (0, 0)]
    assert scores.read([array("f", [1.0, 0.0]), array("f", [0.0, 2.0])]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"max_tokens_per_query": 1}, "[CLS] a [SEP] a b c d [SEP]"),
        ({"max_tokens_per_doc": 3}, "[CLS] a b [SEP] a b c [SEP]"),
        ({"max_tokens_per_doc": 3, "truncation_side": "left"}, "[CLS] a b [SEP] b c d [SEP]"),
        ({"truncate_prompt_tokens": 8}, "[CLS] a b [SEP] a b c [SEP]"),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, "[CLS] a b [SEP] b c d [SEP]"),
        ({"truncate_prompt_tokens": 6}, "[CLS] a [SEP] a b [SEP]"),
        ({"truncate_prompt_tokens": 5}, "[CLS] a [SEP] a [SEP]"),
        ({"truncate_prompt_tokens": -1}, "[CLS] a b [SEP] a b c d [SEP]"),
        ({"truncate_prompt_tokens": 7, "max_tokens_per_query": 1}, "[CLS] a [SEP] a b c [SEP]"),
    ],
)
async def test_pairs_are_cut(fields: dict[str, Any], prompt: str, tokenizer: ModelTokenizer) -> None:
    (one,) = (await validated(of_http(queries="a b", documents="a b c d", **fields), tokenizer)).requests
    assert one.prompt_token_ids == ids(prompt)
    assert one.params == ScoreParams(prompt.split().index("[SEP]") + 1, is_raw=False)


@pytest.fixture(scope="module", params=[template_processor, bert_processor], ids=["template", "bert"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ModelTokenizer]:
    """A tokenizer of its package, and Quire's of the same file."""
    directory = make_encoder_directory(tmp_path_factory.mktemp("encoder"), encoder_tokenizer(request.param()))
    stored = Tokenizer.from_file(str(directory / "tokenizer.json"))
    stored.no_padding()
    return stored, ModelTokenizer.load(directory)


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    num_kept=st.integers(5, 45),
    side=st.sampled_from(TruncationSide),
)
async def test_the_longer_text_of_a_pair_is_cut_first_as_by_transformers(
    lengths: tuple[int, int], num_kept: int, side: TruncationSide, both: tuple[Tokenizer, ModelTokenizer]
) -> None:
    stored, tokenizer = both
    first, second = (" ".join(("abcd" * 5)[:length]) for length in lengths)
    stored.enable_truncation(num_kept, strategy="longest_first", direction=side.value)
    expected = stored.encode(first, second)
    cut = {"truncate_prompt_tokens": num_kept, "truncation_side": side.value}
    call = of_http(queries=first, documents=second, **cut)
    (found,) = (await validated(call, tokenizer, model=ModelInfo("encoder", 45, len(WORDS)))).requests
    assert isinstance(found.params, ScoreParams)
    num_second = len(found.prompt_token_ids) - found.params.num_first_tokens
    types = [0] * found.params.num_first_tokens + [1] * num_second
    assert (found.prompt_token_ids, types) == (expected.ids, expected.type_ids)


async def test_each_text_is_tokenized_once(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    encode_texts = tokenizer.encode_texts

    def counted(texts: Sequence[TextToEncode], tenant: str) -> AsyncGenerator[list[int], None]:
        calls.append([one.text for one in texts])
        return encode_texts(texts, tenant)

    monkeypatch.setattr(tokenizer, "encode_texts", counted)
    await validated(of_http(queries="a", documents=["b", "a", "b", "c"]), tokenizer)
    assert calls == [["a", "b", "c"]]


async def test_a_pair_may_have_as_many_tokens_as_the_context(tokenizer: ModelTokenizer) -> None:
    query, document = " ".join("a" * 5), " ".join("b" * (CONTEXT_LENGTH - 8))
    (one,) = (await validated(of_http(queries=query, documents=document), tokenizer)).requests
    assert len(one.prompt_token_ids) == CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("read", "fields", "reason", "field"),
    [
        (of_http, {"text_1": "a", "text_2": ["b", LONG]}, Reason.CONTEXT_LENGTH_EXCEEDED, "text_2[1]"),
        (of_http, {"queries": LONG, "documents": "b"}, Reason.CONTEXT_LENGTH_EXCEEDED, "queries"),
        (of_http, {"queries": "a " * 7, "documents": "a " * 8}, Reason.CONTEXT_LENGTH_EXCEEDED, "documents"),
        (of_http, {"queries": "a " * 5_000, "documents": "a"}, Reason.CONTEXT_LENGTH_EXCEEDED, "queries"),
        (of_http, {"queries": "a", "documents": {"text": ""}}, Reason.INVALID_FIELD, "documents.text"),
        (of_grpc, {"queries": ["a"], "documents": ["b", LONG]}, Reason.CONTEXT_LENGTH_EXCEEDED, "documents[1]"),
        (of_grpc, {"queries": ["a"], "documents": ["b", ""]}, Reason.INVALID_FIELD, "documents[1]"),
        (of_grpc, {"queries": ["a"], "documents": []}, Reason.INVALID_FIELD, "documents"),
        (of_grpc, {"queries": [], "documents": ["a"]}, Reason.INVALID_FIELD, "queries"),
        (of_grpc, {"queries": ["a"], "documents": ["a"] * 1_025}, Reason.INVALID_FIELD, "documents"),
        (of_grpc, {"queries": ["a"] * 2, "documents": ["a"] * 3}, Reason.INVALID_FIELD, "queries"),
        (
            of_grpc,
            {"queries": ["a"], "documents": ["b"], "max_tokens_per_document": 0},
            Reason.INVALID_FIELD,
            "max_tokens_per_document",
        ),
        (
            of_http,
            {"queries": "a", "documents": "b", "max_tokens_per_query": CONTEXT_LENGTH - 2},
            Reason.INVALID_FIELD,
            "max_tokens_per_query",
        ),
        (
            of_http,
            {"queries": "a", "documents": "b", "truncate_prompt_tokens": 4},
            Reason.INVALID_FIELD,
            "truncate_prompt_tokens",
        ),
        (
            of_http,
            {"queries": "a", "documents": "b", "truncate_prompt_tokens": 17},
            Reason.INVALID_FIELD,
            "truncate_prompt_tokens",
        ),
        (
            of_grpc,
            {"queries": ["a"], "documents": ["b"], "truncation_side": 9},
            Reason.INVALID_FIELD,
            "truncation_side",
        ),
        (of_grpc, {"queries": ["a"], "documents": ["b"], "retention": {}}, Reason.INVALID_FIELD, "retention"),
    ],
)
async def test_an_error_names_the_field(
    read: Callable[..., UnvalidatedScores],
    fields: dict[str, Any],
    reason: Reason,
    field: str,
    tokenizer: ModelTokenizer,
) -> None:
    with pytest.raises(QuireError) as error:
        await validated(read(**fields), tokenizer)
    assert (error.value.reason, error.value.field) == (reason, field)


@pytest.mark.parametrize(
    ("queries", "documents", "vocab_size", "field"),
    [
        ("d", ["a", "b"], WORDS.index("d"), "queries"),
        ("a", ["b", "d"], WORDS.index("d"), "documents[1]"),
        ("[UNK]", ["unknown"], WORDS.index("[SEP]"), "documents[0]"),  # a token that the template writes
    ],
)
async def test_a_pair_with_a_token_that_the_model_lacks_is_refused(
    queries: str, documents: list[str], vocab_size: int, field: str, tokenizer: ModelTokenizer
) -> None:
    model = ModelInfo("encoder", CONTEXT_LENGTH, vocab_size)
    with pytest.raises(QuireError) as error:
        await validated(of_http(queries=queries, documents=documents), tokenizer, model=model)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, field)


async def test_a_refusal_of_the_scheduler_names_the_document(tokenizer: ModelTokenizer) -> None:
    over_http = await validated(of_http(queries="a", documents=["b", {"text": "c"}]), tokenizer)
    over_grpc = await validated(of_grpc(queries=["a"], documents=["b", "c"]), tokenizer)
    for which in (Field.PROMPT, Field.MAX_TOKENS):
        assert over_http.requests[1].field_path(which) == "documents[1].text"
        assert over_grpc.requests[1].field_path(which) == "documents[1]"


def test_fields_of_a_later_contract_are_refused() -> None:
    with pytest.raises(QuireError) as error:
        UnvalidatedScores.from_proto(api.ScoreRequest.FromString(b"\xf8\x06\x01"))
    assert error.value.reason is Reason.FEATURE_UNSUPPORTED
