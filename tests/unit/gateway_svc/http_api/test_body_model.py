"""Errors of bodies that do not fit their model: message and path as the body spells it."""

import json
import math
from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from gateway_svc.http_api.body_model import BodyModel, Items, JsonObject, Neutral, Number, option
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody, GenerationBody
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from svc_common.errors import QuireError, Reason


class Inner(BodyModel):
    """An object in a body."""

    unserved: ClassVar[Neutral] = {"sound": (), "color": ("red",)}

    name: str = Field(description="Its name.")
    number: Number | None = option("A number.")


class Outer(BodyModel):
    """A body."""

    inner: Inner | None = option("An object.")
    items: Items[Inner] | None = option("Objects.")
    ids: Items[int] | None = option("Integers.")
    flag: bool | None = option("A flag.", False)
    text_: str | None = option("A text.", alias="text")
    free: JsonObject | None = option("Any object.")


class OtherProtocol(BodyModel):
    """A body of another protocol, with some of the same fields."""

    elsewhere: ClassVar = (Outer, Inner)
    unserved: ClassVar[Neutral] = {"ids": ([],)}

    name: str | None = option("Its name.")


NAMED: dict[str, Any] = {"name": "a"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner": 1}, "inner: must be an object"),
        ({"inner": {}}, "inner.name: must be given"),
        ({"inner": {"name": None}}, "inner.name: must be given"),
        ({"inner": {"name": 1}}, "inner.name: must be a string"),
        ({"inner": {**NAMED, "number": "1"}}, "inner.number: must be a number"),
        ({"inner": {**NAMED, "number": True}}, "inner.number: must be a number"),
        ({"inner": {**NAMED, "number": math.nan}}, "inner.number: must be a finite number"),
        ({"inner": {**NAMED, "number": 10**400}}, "inner.number: must be a finite number"),
        ({"items": {}}, "items: must be a list"),
        ({"items": [NAMED, None]}, "items[1]: must be an object"),
        ({"items": [NAMED, {**NAMED, "sound": 1}]}, "items[1].sound: is not served"),
        ({"items": [{**NAMED, "color": "blue"}]}, "items[0].color: is not served"),
        ({"ids": [1, 2, True]}, "ids[2]: must be an integer"),
        ({"ids": [1, 2.0]}, "ids[1]: must be an integer"),
        ({"flag": 0}, "flag: must be true or false"),
        ({"text": []}, "text: must be a string"),
        ({"free": []}, "free: must be an object"),
    ],
)
def test_what_does_not_fit_is_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(QuireError) as raised:
        Outer.of(values)
    assert str(raised.value) == expected


def test_null_is_absent_and_neutral_values_are_accepted() -> None:
    nulls = Outer.of(dict.fromkeys(("inner", "items", "ids", "flag", "text", "free")))
    assert nulls == Outer.of({})
    assert Outer.of({"inner": {**NAMED, "color": "red", "sound": None, "unknown": 1}}) == Outer.of({"inner": NAMED})


def test_what_only_bodies_of_other_protocols_serve_is_refused_unless_it_is_off() -> None:
    assert OtherProtocol.of({"name": "a", "flag": False, "color": "red", "ids": [], "number": None}).name == "a"
    for name, value in (("flag", True), ("color", "blue"), ("ids", [1]), ("text", ""), ("number", 1), ("sound", 1)):
        with pytest.raises(QuireError) as raised:
            OtherProtocol.of({name: value})
        assert str(raised.value) == f"{name}: is not served"
    assert OtherProtocol.served_fields() == {"name"}
    assert OtherProtocol.known_fields() == Outer.known_fields() | Inner.known_fields()


def test_of_many_bad_items_only_the_first_is_an_error() -> None:
    """An error for each item of a large body would take more memory than the body."""
    for name, items in (("ids", ["a"] * 1_000), ("items", [1] * 1_000)):
        with pytest.raises(ValidationError) as raised:
            Outer.model_validate({name: items})
        assert raised.value.error_count() == 1


def test_nan_in_a_field_that_is_not_read_is_refused_with_the_body() -> None:
    with pytest.raises(QuireError) as raised:
        Outer.read(parse_body(b'{"unknown": NaN}'))
    assert raised.value.reason is Reason.MALFORMED_MESSAGE


def test_sampling_parameters_have_the_types_and_ranges_of_the_validator() -> None:
    properties = GenerationBody.model_json_schema()["properties"]
    for one in SAMPLING_FIELDS:
        schema = properties[one.name]
        kind = schema["anyOf"][0]["type"]
        assert (kind, schema["maximum"], schema["default"]) == (
            "integer" if one.is_integer else "number",
            one.most,
            None if one.may_be_configured else one.default,
        )
        assert one.least in (schema.get("minimum"), schema.get("exclusiveMinimum"))


@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
def test_every_field_has_a_description(model: type[BodyModel]) -> None:
    schema = model.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            assert "description" in field or "$ref" in json.dumps(field), name
