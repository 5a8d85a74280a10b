"""Bodies and answers of /v1/embeddings."""

import base64
import struct
import sys
from array import array
from typing import Any

import pytest

from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.embeddings.routes import EncodingFormat, answer_of, read_embeddings
from gateway_svc.output import Usage
from svc_common.errors import QuireError, Reason

VECTORS = [array("f", (0.5, -1.25, 3e38)), array("f", (0.1, 0.0, -0.0))]


def refusal(**body: Any) -> QuireError:
    with pytest.raises(QuireError) as error:
        read_embeddings(EmbeddingsBody.of({"input": "a", **body}))
    return error.value


def test_an_answer_has_the_vectors_in_their_order() -> None:
    answer = answer_of("embd-1", 12, VECTORS, EncodingFormat.FLOAT, "m", Usage(prompt_tokens=7, cached_tokens=2))
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert answer["data"][0]["embedding"] == [0.5, -1.25, struct.unpack("f", struct.pack("f", 3e38))[0]]
    assert (answer["object"], answer["model"]) == ("list", "m")
    assert (answer["id"], answer["created"]) == ("embd-1", 12)


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_base64_is_little_endian(byteorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VECTORS[0][:]
    expected = struct.pack("<3f", *vector)
    if byteorder != sys.byteorder:
        vector.byteswap()  # as such a machine has it
        monkeypatch.setattr(sys, "byteorder", byteorder)
    encoded = EncodingFormat.BASE64.encode(vector)
    assert isinstance(encoded, str)
    assert base64.b64decode(encoded) == expected


def test_the_format_is_float_unless_it_is_requested() -> None:
    for value, expected in ((None, EncodingFormat.FLOAT), ("base64", EncodingFormat.BASE64)):
        body = EmbeddingsBody.of({"input": "a", "encoding_format": value})
        assert read_embeddings(body).encoding_format is expected


def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing() -> None:
    asked = {
        "prompt": "a", "embed_dtype": "float16", "endianness": "big", "padding": "max_length",
        "mm_processor_kwargs": {"a": 1}, "request_id": "a", "cache_salt": "a", "task": "embed", "chat_template": "a",
        "input_type": "query", "output_dtype": "int8", "truncate": True, "embd_normalize": 1, "late_chunking": True,
        "stream": True, "temperature": 0.5, "n": 2, "inputs": "a",
    }  # fmt: skip
    for name, value in asked.items():
        error = refusal(**{name: value})
        assert (error.reason, error.field) == (Reason.FEATURE_UNSUPPORTED, name)
    neutral = {
        "embed_dtype": "float32", "endianness": "native", "padding": "do_not_pad", "output_dtype": "float",
        "truncate": False, "late_chunking": False, "stream": False, "user": "me", "metadata": {}, "messages": None,
        "service_tier": "auto",
    }  # fmt: skip
    read_embeddings(EmbeddingsBody.of({"input": "a", **neutral}))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": 1}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [5, "a"]}, "input[1]"),
        ({"input": [[5, "a"]]}, "input[0][1]"),
        ({"input": ["a"] * 2_049}, "input"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"dimensions": "8"}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": None, "messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {
                "input": None,
                "messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ({"normalize": True, "use_activation": False}, "use_activation"),
    ],
)
def test_other_values_are_refused_by_the_field(body: dict[str, Any], field: str) -> None:
    error = refusal(**body)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
