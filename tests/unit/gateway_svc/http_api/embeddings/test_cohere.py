"""Bodies and answers of /v2/embed."""

import base64
import struct
from array import array
from typing import Any

import pytest

from gateway_svc.embeddings import DIMENSIONS
from gateway_svc.field_paths import Field
from gateway_svc.http_api.calls import InputValues
from gateway_svc.http_api.embeddings.cohere_models import CohereEmbedBody
from gateway_svc.http_api.embeddings.cohere_routes import CohereEmbedRequest, embed_answer, packed, read_embed
from gateway_svc.output import Usage
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import TruncationSide
from svc_common.errors import QuireError, Reason

VECTOR = array("f", (0.5, -1.0, 0.0, -0.25, 2.0, 3.0, -1.0, 1.0))


def read(**body: Any) -> CohereEmbedRequest:
    return read_embed(CohereEmbedBody.of({"texts": ["a", "b"], **body}))


def test_a_body_has_texts_and_their_truncation() -> None:
    cases: tuple[tuple[dict[str, Any], int | None, TruncationSide], ...] = (
        ({}, -1, TruncationSide.RIGHT),
        ({"truncate": "END", "max_tokens": 5}, 5, TruncationSide.RIGHT),
        ({"truncate": "START"}, -1, TruncationSide.LEFT),
        ({"truncate": "NONE"}, None, TruncationSide.RIGHT),
    )
    for fields, kept, side in cases:
        unvalidated = read(output_dimension=3, **fields).unvalidated
        prompts = [TextPrompt(text, add_special_tokens=True) for text in "ab"]
        assert [one.prompt for one in unvalidated.inputs] == prompts
        assert (unvalidated.truncate_prompt_tokens, unvalidated.truncation_side) == (kept, side)
        assert unvalidated.dimensions == 3
    names = (unvalidated.field_path(DIMENSIONS), unvalidated.inputs[1].field_path(Field.TEXT))
    assert names == ("output_dimension", "texts[1]")


def test_an_answer_has_each_form_that_was_asked_for() -> None:
    embedded = InputValues([VECTOR], "m", Usage(prompt_tokens=7, cached_tokens=2))
    asked = read(texts=["a"], embedding_types=["float", "base64", "binary", "ubinary", "float"])
    answer = embed_answer("embd-1", asked, embedded)
    encoded = base64.b64encode(struct.pack("<8f", *VECTOR)).decode()
    assert answer == {
        "id": "embd-1",
        "response_type": "embeddings_by_type",
        "embeddings": {
            "float": [list(VECTOR)],
            "base64": [encoded],
            "binary": [[0b10101101 - 128]],
            "ubinary": [[0b10101101]],
        },
        "texts": ["a"],
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 7, "image_tokens": 0}},
    }
    assert list(embed_answer("e", read(texts=["a"]), embedded)["embeddings"]) == ["float"]


@pytest.mark.parametrize("use", ["search_document", "search_query", "classification", "clustering", None])
def test_a_text_is_the_same_whatever_it_is_for(use: str | None) -> None:
    assert read(texts=["a"], input_type=use) == read(texts=["a"])


def test_bits_need_a_multiple_of_eight_numbers() -> None:
    with pytest.raises(QuireError) as error:
        packed(VECTOR[:6], is_signed=True)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_FIELD, "embedding_types")


@pytest.mark.parametrize(
    ("body", "reason", "field"),
    [
        ({"texts": None}, Reason.INVALID_FIELD, "texts"),
        ({"texts": "a"}, Reason.INVALID_FIELD, "texts"),
        ({"texts": []}, Reason.INVALID_FIELD, "texts"),
        ({"texts": ["a"] * 2049}, Reason.INVALID_FIELD, "texts"),
        ({"embedding_types": ["int8"]}, Reason.INVALID_FIELD, "embedding_types[0]"),
        ({"truncate": "MIDDLE"}, Reason.INVALID_FIELD, "truncate"),
        ({"max_tokens": 0}, Reason.INVALID_FIELD, "max_tokens"),
        ({"max_tokens": 5, "truncate": "NONE"}, Reason.INVALID_FIELD, "max_tokens"),
        ({"output_dimension": 12, "embedding_types": ["float", "ubinary"]}, Reason.INVALID_FIELD, "output_dimension"),
        ({"input_type": "image"}, Reason.INVALID_FIELD, "input_type"),
        ({"images": ["a"]}, Reason.FEATURE_UNSUPPORTED, "images"),
        ({"input": "a"}, Reason.FEATURE_UNSUPPORTED, "input"),
    ],
)
def test_other_values_are_refused_by_the_field(body: dict[str, Any], reason: Reason, field: str) -> None:
    with pytest.raises(QuireError) as error:
        read(**body)
    assert (error.value.reason, error.value.field) == (reason, field)
