"""Calls for embeddings of both protocols, validated by the one validator."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from encoder_model import CONTEXT_LENGTH, WORDS, ids, make_encoder_directory
from gateway_svc.embedding_validation import validate_embeddings
from gateway_svc.embeddings import EmbeddingParams, Normalization, Pooling, UnvalidatedEmbeddings
from gateway_svc.field_paths import Field, contract_field_path
from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.embeddings.routes import read_embeddings
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.retention import NONE, Retention
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import ModelInfo
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import MAX_TEXT_TOKENS, ValueInput, input_fields
from quire.inference.v1 import inference_pb2 as api
from svc_common.errors import QuireError, Reason

MODEL = ModelInfo("encoder", CONTEXT_LENGTH, len(WORDS))
LONG = " ".join("abcd" * 5)  # 20 tokens, and two special ones


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A tokenizer as in BERT."""
    return ModelTokenizer.load(make_encoder_directory(tmp_path_factory.mktemp("encoder")))


def of_grpc(**fields: Any) -> UnvalidatedEmbeddings:
    """A call from the wire."""
    sent = api.EmbedRequest(**fields).SerializeToString()
    return UnvalidatedEmbeddings.from_proto(api.EmbedRequest.FromString(sent))


def of_http(**fields: Any) -> UnvalidatedEmbeddings:
    """A body."""
    return read_embeddings(EmbeddingsBody.read(parse_body(json.dumps(fields).encode()))).inputs.unvalidated


async def validated(
    unvalidated: UnvalidatedEmbeddings, tokenizer: ModelTokenizer, model: ModelInfo = MODEL
) -> list[ValidatedValue]:
    return await validate_embeddings(
        unvalidated, tokenizer, model, request_id="own-id", retention=unvalidated.retention, tenant="default"
    )


async def test_inputs_of_both_protocols_are_tokens_in_their_order(encoder: ModelTokenizer) -> None:
    inputs = [{"text": "hello worlds"}, {"token_ids": {"ids": [5, 6]}}, {"text": " "}]
    over_grpc = await validated(of_grpc(inputs=inputs), encoder)
    over_http = await validated(of_http(input=["hello worlds", [5, 6], " "]), encoder)
    assert over_grpc == over_http
    assert [one.prompt_token_ids for one in over_grpc] == [
        ids("[CLS] hello world ##s [SEP]"),
        [5, 6],
        ids("[CLS] [SEP]"),
    ]


@pytest.mark.parametrize(
    ("value", "prompts"), [("a", [ids("[CLS] a [SEP]")]), ([5, 6], [[5, 6]]), ([[5], [6]], [[5], [6]])]
)
async def test_one_input_needs_no_list(value: Any, prompts: list[list[int]], encoder: ModelTokenizer) -> None:
    assert [one.prompt_token_ids for one in await validated(of_http(input=value), encoder)] == prompts


async def test_options_of_both_protocols_are_the_schedulers(encoder: ModelTokenizer) -> None:
    common = {"dimensions": 8, "priority": -3}
    fields: dict[str, Any] = {"inputs": [{"text": "a"}], "pooling": "POOLING_CLS", "normalize": False}
    (over_grpc,) = await validated(of_grpc(**fields, **common, retention={"none": {}}), encoder)
    body = {"input": "a", "pooling": "cls", "normalize": False, "retention": "none"}
    (over_http,) = await validated(of_http(**body, **common), encoder)
    assert over_grpc == over_http
    assert over_grpc.params == EmbeddingParams(8, Pooling.CLS, Normalization.NONE)
    submit = over_http.to_proto()
    assert (submit.n, submit.max_tokens, submit.priority, submit.model) == (1, 0, -3, "encoder")
    assert list(submit.prompt_token_ids) == ids("[CLS] a [SEP]")
    assert submit.retention.is_unrecorded
    assert submit.render_options.request_id == "own-id"
    embedding = submit.result.embedding
    assert (embedding.pooling, embedding.num_dimensions, embedding.normalization) == (2, 8, 1)


async def test_absent_options_are_those_of_the_model(encoder: ModelTokenizer) -> None:
    for unvalidated in (of_grpc(inputs=[{"text": "a"}]), of_http(input="a")):
        (one,) = await validated(unvalidated, encoder)
        assert one.params == EmbeddingParams(None, Pooling.OF_MODEL, Normalization.OF_MODEL)
        submit = one.to_proto()
        assert submit.result.WhichOneof("kind") == "embedding"
        assert not submit.HasField("retention")
        assert (submit.result.embedding.pooling, submit.result.embedding.normalization) == (0, 0)


@pytest.mark.parametrize(
    ("value", "expected"), [(True, Normalization.L2), (False, Normalization.NONE), (None, Normalization.OF_MODEL)]
)
async def test_normalize_has_two_names_over_http(value: bool | None, expected: Normalization) -> None:
    assert of_http(input="a", normalize=value).normalization is expected
    assert of_http(input="a", use_activation=value).normalization is expected
    assert of_http(input="a", use_activation=value, normalize=value).normalization is expected


def test_retentions_are_read() -> None:
    assert of_http(input="a", retention=5).retention == Retention(is_recorded=True, seconds=5)
    assert of_grpc(inputs=[{"text": "a"}], retention={"seconds": 5}).retention == Retention(is_recorded=True, seconds=5)
    assert of_grpc(inputs=[{"text": "a"}], retention={"none": {}}).retention == NONE


@pytest.mark.parametrize(
    ("truncate", "side", "first", "last"),
    [
        (-1, None, "[CLS] a b c d a b c d a b c d a b [SEP]", [5] * 16),
        (4, None, "[CLS] a b [SEP]", [5] * 4),
        (4, "right", "[CLS] a b [SEP]", [5] * 4),
        (4, "left", "[CLS] c d [SEP]", [5, 5, 5, 6]),
    ],
)
async def test_long_inputs_are_truncated_at_the_end_by_default(
    truncate: int, side: str | None, first: str, last: list[int], encoder: ModelTokenizer
) -> None:
    token_ids = [5] * 19 + [6]
    body = {"input": [LONG, token_ids], "truncate_prompt_tokens": truncate, "truncation_side": side}
    of_side = "TRUNCATION_SIDE_UNSPECIFIED" if side is None else f"TRUNCATION_SIDE_{side.upper()}"
    inputs = [{"text": LONG}, {"token_ids": {"ids": token_ids}}]
    message = {"inputs": inputs, "truncate_prompt_tokens": truncate, "truncation_side": of_side}
    for unvalidated in (of_http(**body), of_grpc(**message)):
        prompts = [one.prompt_token_ids for one in await validated(unvalidated, encoder)]
        assert prompts == [ids(first), last]


@pytest.mark.parametrize(
    ("limits", "truncate", "kept"),
    [
        ((2, None), None, ["[CLS] a b [SEP]", "[CLS] a b c d [SEP]"]),
        ((4, 1), None, ["[CLS] a b c d [SEP]", "[CLS] a [SEP]"]),
        ((2, None), 5, ["[CLS] a b [SEP]", "[CLS] a b c [SEP]"]),
        ((4, None), 3, ["[CLS] a [SEP]", "[CLS] a [SEP]"]),
        ((14, 14), -1, ["[CLS] a b c d [SEP]", "[CLS] a b c d [SEP]"]),
    ],
)
async def test_an_input_may_have_a_limit_of_its_own(
    limits: tuple[int | None, int | None], truncate: int | None, kept: list[str], encoder: ModelTokenizer
) -> None:
    call = of_http(input=["a b c d"] * 2, truncate_prompt_tokens=truncate)
    inputs = [replace(one, max_text_tokens=most) for one, most in zip(call.inputs, limits, strict=True)]
    found = await validated(replace(call, inputs=inputs), encoder)
    assert [one.prompt_token_ids for one in found] == [ids(text) for text in kept]


@pytest.mark.parametrize("most", [-1, 0, CONTEXT_LENGTH - 1, 2**63])
async def test_a_limit_of_an_input_leaves_room_for_special_tokens(most: int, encoder: ModelTokenizer) -> None:
    names = input_fields("documents[3]", "documents[3]", "", {MAX_TEXT_TOKENS: "max_tokens_per_doc"})
    inputs = [ValueInput(TextPrompt("a"), names, most)]
    with pytest.raises(QuireError) as error:
        await validated(UnvalidatedEmbeddings(inputs=inputs, field_path=contract_field_path), encoder)
    assert (error.value.field, str(error.value)) == (
        "max_tokens_per_doc",
        "max_tokens_per_doc: must be between 1 and 14",
    )


async def test_special_tokens_are_left_out_on_request(encoder: ModelTokenizer) -> None:
    cut = {"truncate_prompt_tokens": 1}
    for fields, prompt in (({}, "a b"), (cut, "a")):
        for unvalidated in (
            of_http(input="a b", add_special_tokens=False, **fields),
            of_grpc(inputs=[{"text": "a b"}], add_special_tokens=False, **fields),
        ):
            (one,) = await validated(unvalidated, encoder)
            assert one.prompt_token_ids == ids(prompt)


async def test_an_input_may_have_as_many_tokens_as_the_context(encoder: ModelTokenizer) -> None:
    text = " ".join("a" * (CONTEXT_LENGTH - 2))
    for given in (text, [5] * CONTEXT_LENGTH):
        (one,) = await validated(of_http(input=given), encoder)
        assert len(one.prompt_token_ids) == CONTEXT_LENGTH


async def test_a_long_text_of_few_tokens_is_not_too_long(encoder: ModelTokenizer) -> None:
    (one,) = await validated(of_http(input="x" * 150 + " " * 100), encoder)
    assert one.prompt_token_ids == ids("[CLS] [UNK] [SEP]")


MANY: dict[str, Any] = {"inputs": [{"text": "a"}] * 2_049}


@pytest.mark.parametrize(
    ("read", "fields", "reason", "field"),
    [
        (of_http, {"input": ["a", LONG]}, Reason.CONTEXT_LENGTH_EXCEEDED, "input[1]"),
        (of_http, {"input": LONG}, Reason.CONTEXT_LENGTH_EXCEEDED, "input"),
        (of_http, {"input": [[5] * 17]}, Reason.CONTEXT_LENGTH_EXCEEDED, "input[0]"),
        (of_http, {"input": "a " * 10_000, "truncate_prompt_tokens": -1}, Reason.CONTEXT_LENGTH_EXCEEDED, "input"),
        (of_http, {"input": [5] * 257, "truncate_prompt_tokens": -1}, Reason.CONTEXT_LENGTH_EXCEEDED, "input"),
        (of_http, {"input": ["a", ""]}, Reason.INVALID_FIELD, "input[1]"),
        (of_http, {"input": []}, Reason.INVALID_FIELD, "input"),
        (of_http, {"input": [[]]}, Reason.INVALID_FIELD, "input[0]"),
        (of_http, {"input": " ", "add_special_tokens": False}, Reason.INVALID_FIELD, "input"),
        (of_http, {"input": [[5], [5, 12]]}, Reason.INVALID_FIELD, "input[1][1]"),
        (of_http, {}, Reason.INVALID_FIELD, "input"),
        (of_http, {"input": "a", "dimensions": 0}, Reason.INVALID_FIELD, "dimensions"),
        (of_http, {"input": "a", "dimensions": 65_537}, Reason.INVALID_FIELD, "dimensions"),
        (of_http, {"input": "a", "truncate_prompt_tokens": 2}, Reason.INVALID_FIELD, "truncate_prompt_tokens"),
        (of_http, {"input": "a", "truncate_prompt_tokens": 17}, Reason.INVALID_FIELD, "truncate_prompt_tokens"),
        (of_http, {"input": [5], "truncate_prompt_tokens": 0}, Reason.INVALID_FIELD, "truncate_prompt_tokens"),
        (of_grpc, {}, Reason.INVALID_FIELD, "inputs"),
        (of_grpc, MANY, Reason.INVALID_FIELD, "inputs"),
        (of_grpc, {"inputs": [{}]}, Reason.INVALID_FIELD, "inputs[0]"),
        (of_grpc, {"inputs": [{"text": "a"}, {"text": LONG}]}, Reason.CONTEXT_LENGTH_EXCEEDED, "inputs[1].text"),
        (of_grpc, {"inputs": [{"token_ids": {}}]}, Reason.INVALID_FIELD, "inputs[0].token_ids.ids"),
        (of_grpc, {"inputs": [{"token_ids": {"ids": [99]}}]}, Reason.INVALID_FIELD, "inputs[0].token_ids.ids[0]"),
        (of_grpc, {"inputs": [{"text": "a"}], "retention": {}}, Reason.INVALID_FIELD, "retention"),
        (of_grpc, {"inputs": [{"text": "a"}], "pooling": 9}, Reason.INVALID_FIELD, "pooling"),
    ],
)
async def test_an_error_names_the_field(
    read: Callable[..., UnvalidatedEmbeddings],
    fields: dict[str, Any],
    reason: Reason,
    field: str,
    encoder: ModelTokenizer,
) -> None:
    with pytest.raises(QuireError) as error:
        await validated(read(**fields), encoder)
    assert (error.value.reason, error.value.field) == (reason, field)


async def test_a_text_with_a_token_that_the_model_lacks_is_refused(encoder: ModelTokenizer) -> None:
    model = replace(MODEL, vocab_size=WORDS.index("d"))
    assert await validated(of_http(input=["a", "c"]), encoder, model)
    with pytest.raises(QuireError) as error:
        await validated(of_http(input=["a", "c d"]), encoder, model)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "input[1]")


async def test_a_refusal_of_the_scheduler_names_the_input(encoder: ModelTokenizer) -> None:
    over_http = await validated(of_http(input=["a", "b"]), encoder)
    over_grpc = await validated(of_grpc(inputs=[{"text": "a"}, {"text": "b"}]), encoder)
    for which in (Field.PROMPT, Field.MAX_TOKENS):
        assert over_http[1].field_path(which) == "input[1]"
        assert over_grpc[1].field_path(which) == "inputs[1]"


def test_fields_of_a_later_contract_are_refused() -> None:
    for data in (b"\xf8\x06\x01", b"\x12\x06\x0a\x01a\xf8\x06\x01"):
        with pytest.raises(QuireError) as error:
            UnvalidatedEmbeddings.from_proto(api.EmbedRequest.FromString(data))
        assert error.value.reason is Reason.FEATURE_UNSUPPORTED
