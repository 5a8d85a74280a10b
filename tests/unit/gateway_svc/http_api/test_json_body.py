"""Parsing of a body's bytes."""

import json
import tracemalloc

import pytest

from gateway_svc.http_api.body_model import BodyModel, JsonObject
from gateway_svc.http_api.json_body import MAX_JSON_TOKENS, parse_body
from svc_common.errors import QuireError, Reason


def refused(data: bytes) -> Reason:
    with pytest.raises(QuireError) as raised:
        parse_body(data)
    return raised.value.reason


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'""', b"null", b'{"a":[1]}'])
def test_the_number_of_values_has_a_bound(item: bytes) -> None:
    """For the parser of Python lets no other thread run: no stream of the gateway gets a token meanwhile."""
    assert refused(b'{"x":[' + (item + b",") * MAX_JSON_TOKENS + item + b"]}") is Reason.MESSAGE_TOO_LARGE


def test_as_many_values_as_are_allowed_are_read() -> None:
    # Tokens beside the commas: {, "x" and [.
    data = b'{"x":[' + b"1," * (MAX_JSON_TOKENS - 3) + b"1]}"
    assert len(parse_body(data).values["x"]) == MAX_JSON_TOKENS - 2
    assert refused(data.replace(b"[1", b"[1,1")) is Reason.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(
    "text", ['[],{}"', "\\", '\\"[', "\n,", "\u2200["], ids=["all", "slash", "mix", "line", "wide"]
)
def test_what_is_in_a_string_does_not_count(text: str) -> None:
    prompt = text * MAX_JSON_TOKENS
    assert parse_body(json.dumps({"prompt": prompt}).encode()).values == {"prompt": prompt}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_not_json(encoding: str) -> None:
    assert refused('{"prompt": "a"}'.encode(encoding)) is Reason.MALFORMED_MESSAGE


def test_a_byte_order_mark_is_ignored() -> None:
    assert parse_body('{"prompt": "a"}'.encode("utf-8-sig")).values == {"prompt": "a"}


def test_the_time_for_a_string_without_end_is_linear() -> None:
    assert refused(b'{"prompt": "' + b'\\"' * 4 * MAX_JSON_TOKENS) is Reason.MALFORMED_MESSAGE


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"a": {"b": [0, {"c": 1, "c": 2}]}}', "a.b[1].c"),
        ('{"a": [[{"c": 1}, {"": {"d": 1, "d": 2}}]]}', "a[0][1]..d"),
        ('{"a": 1, "a": 2}', "a"),
    ],
)
def test_a_key_that_is_there_twice_is_named_with_its_path(body: str, path: str) -> None:
    with pytest.raises(QuireError, match="is there twice") as raised:
        parse_body(body.encode())
    assert raised.value.field == path


def test_a_long_key_above_many_values_takes_little_memory() -> None:
    values = ",".join(f'"{index}": 0' for index in range(2000))
    body = f'{{"a": {{"x": 1, "x": 2}}, "{"k" * 100_000}": {{{values}}}}}'.encode()
    tracemalloc.start()
    try:
        assert refused(body) is Reason.INVALID_FIELD
        assert tracemalloc.get_traced_memory()[1] < 20 * len(body)
    finally:
        tracemalloc.stop()


class Form(BodyModel):
    """A body with a part that is passed on as it is."""

    form: JsonObject | None = None


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 250 + "e99", "1" * 4_000 + ".0", "Infinity", "NaN"])
@pytest.mark.parametrize("field", ["form", "unknown"])
def test_a_number_without_a_finite_value_is_refused_wherever_it_is(field: str, number: str) -> None:
    """Answers and records have values of bodies: such a number would fail them after the tokens are computed."""
    with pytest.raises(QuireError, match="not a finite number") as raised:
        Form.read(parse_body(f'{{"{field}": {{"a": [{number}]}}}}'.encode()))
    assert raised.value.reason is Reason.MALFORMED_MESSAGE
    assert len(str(raised.value)) < 400


def test_large_and_small_numbers_are_read() -> None:
    assert parse_body(b'{"a": [1e308, 1e-999, -0.5, 3]}').values == {"a": [1e308, 0.0, -0.5, 3]}
