"""Fields that no API defines: near misses of known names are refused, others are reported."""

import random
import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from gateway_svc.http_api import undefined_fields
from gateway_svc.http_api.anthropic.models import MessagesBody
from gateway_svc.http_api.body_model import BodyModel
from gateway_svc.http_api.ollama.models import OllamaChatBody, OllamaGenerateBody
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.undefined_fields import UndefinedFields, header_value, near_miss, num_edits
from svc_common.errors import QuireError, Reason


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatura", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("modle", "model"),
        ("topP", "top_p"),
        ("massages", "messages"),
        ("stream_option", "stream_options"),
        ("stop_sequence", "stop_sequences"),  # known, but not served
        ("\ud800model", "model"),
        # Other words.
        ("m", None),
        ("id", None),
        ("step", "stop"),
        ("state", None),
        ("temp", None),
        ("conversation", None),
        ("x" * 10_000, None),
    ],
)
def test_near_misses(name: str, meant: str | None) -> None:
    assert near_miss(name, ChatBody.known_fields()) == meant


@pytest.mark.parametrize(
    "name",
    [
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "skip_clone",
        "skip_reading_prefix_cache",
        "trace_decode_token_ids",
    ],
)
def test_fields_that_only_vllms_python_api_has_are_reported(name: str) -> None:
    for model in (CompletionBody, ChatBody, ResponsesBody):
        assert UndefinedFields.WARN.check(model, {name: True}) == [name]


def test_edits() -> None:
    for left, right, expected in [("", "", 0), ("ab", "", 2), ("ab", "ba", 1), ("abc", "axc", 1), ("abcd", "acbde", 2)]:
        assert num_edits(left, right, 2) == num_edits(right, left, 2) == expected
        assert num_edits(left, right, 1) == num_edits(right, left, 1) == (expected if expected < 2 else None)


def _all_edits(left: str, right: str) -> int:
    """The distance by its definition, however large."""
    if not left or not right:
        return len(left) + len(right)
    edits = [
        _all_edits(left[1:], right) + 1,
        _all_edits(left, right[1:]) + 1,
        _all_edits(left[1:], right[1:]) + (left[0] != right[0]),
    ]
    if left[:2] == right[1::-1] and len(left) > 1:
        edits.append(_all_edits(left[2:], right[2:]) + 1)
    return min(edits)


def _nearest(name: str, known: frozenset[str]) -> str | None:
    """What is meant, of the full distances from all known names."""
    near = [
        (edits, other)
        for other in known
        if (edits := num_edits(name, other, 99)) is not None
        and edits <= (2 if len(other) > 5 else 1 if len(other) > 3 else 0)
    ]
    return min(near)[1] if near else None


def test_edits_are_the_fewest() -> None:
    draw = random.Random(5)
    for _ in range(300):
        left, right = ("".join(draw.choices("ab_", k=draw.randrange(7))) for _ in range(2))
        edits = _all_edits(left, right)
        for most in (1, 2, 99):
            assert num_edits(left, right, most) == (edits if edits <= most else None), (left, right)


def test_the_name_that_is_meant_is_the_nearest_of_all_known_names() -> None:
    draw = random.Random(6)
    for _ in range(300):
        known = frozenset("".join(draw.choices("ab_", k=draw.randrange(1, 9))) for _ in range(6))
        name = "".join(draw.choices("ab_", k=draw.randrange(9)))
        assert near_miss(name, known) == _nearest(name, known), (name, known)
        present = known - {_nearest(name, known)}
        assert near_miss(name, known, present) == _nearest(name, known - present), (name, known)


def test_known_names_with_a_few_edits_mean_the_nearest_one() -> None:
    draw, known = random.Random(7), ChatBody.known_fields()
    for name in draw.sample(sorted(known), 60):
        edited = list(name)
        for _ in range(draw.randrange(4)):
            place = draw.randrange(len(edited))
            match draw.randrange(4):
                case 0:
                    edited[place] = ""
                case 1:
                    edited.insert(place, draw.choice("aeis_"))
                case 2:
                    edited[place] = draw.choice("aeis_")
                case 3:
                    edited[place : place + 2] = reversed(edited[place : place + 2])
        misspelt = "".join(edited).lower()
        assert near_miss(misspelt, known) == _nearest(misspelt, known), (name, misspelt)


def test_names_that_are_far_from_all_known_ones_are_compared_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counted(left: str, right: str, most: int) -> int | None:
        compared.append(right)
        return num_edits(left, right, most)

    monkeypatch.setattr(undefined_fields, "num_edits", counted)
    far = {f"q{index:02}" + "z" * 14: 1 for index in range(64)}
    assert len(UndefinedFields.WARN.check(ChatBody, far)) == 64
    assert len(compared) == 0
    for name in sorted(ChatBody.known_fields()):  # the same characters as a known name, in another order
        compared.clear()
        near_miss(name[::-1], ChatBody.known_fields())
        assert len(compared) <= 16, name


def test_a_near_miss_is_refused_and_others_are_reported() -> None:
    fields = {"prompt": "a", "brand_new": 1, "other": {}, "absent": None, "user": "me"}
    assert list(UndefinedFields.WARN.check(CompletionBody, fields)) == ["brand_new", "other"]
    with pytest.raises(QuireError, match=r"temprature: is not a known field: did you mean temperature\?") as raised:
        UndefinedFields.WARN.check(CompletionBody, {**fields, "temprature": 1})
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, "temprature")


def test_only_served_fields_are_suggested() -> None:
    with pytest.raises(QuireError) as raised:
        UndefinedFields.WARN.check(ChatBody, {"messages": [], "input": "a"})
    assert str(raised.value) == "input: is not a known field (and inputs is not served)"


def test_a_field_that_the_body_has_is_not_what_another_one_means() -> None:
    assert UndefinedFields.WARN.check(ChatBody, {"model": "m", "mode": "instruct"}) == ["mode"]
    with pytest.raises(QuireError, match="did you mean model"):
        UndefinedFields.WARN.check(ChatBody, {"model": None, "mode": "m"})


@pytest.mark.parametrize(
    ("model", "fields", "field", "meant"),
    [
        (OllamaChatBody, {"options": {"temprature": 1}}, "options.temprature", "temperature"),
        (ChatBody, {"stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
        (ChatBody, {"response_format": {"json_schema": {"schem": {}}}}, "response_format.json_schema.schem", "schema"),
        (ResponsesBody, {"text": {"formt": {}}}, "text.formt", "format"),
        (ResponsesBody, {"text": {"format": {"typ": "text"}}}, "text.format.typ", "type"),
        (ResponsesBody, {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
        (MessagesBody, {"output_config": {"efort": "low"}}, "output_config.efort", "effort"),
        (MessagesBody, {"thinking": {"budget_token": 5}}, "thinking.budget_token", "budget_tokens"),
    ],
)
def test_near_misses_in_options_are_refused(model: type[BodyModel], fields: Any, field: str, meant: str) -> None:
    with pytest.raises(QuireError, match=rf"did you mean {meant}\?") as raised:
        UndefinedFields.WARN.check(model, fields)
    assert raised.value.field == field


def test_undefined_fields_in_options_are_reported_and_limited_with_the_others() -> None:
    fields = {"options": {"brand_new": 1, "num_ctx": 1, "temperature": None}, "other": 1, "think": 1}
    assert UndefinedFields.WARN.check(OllamaChatBody, fields) == ["other", "options.brand_new"]
    assert UndefinedFields.WARN.check(OllamaChatBody, {"options": ["a"]}) == []
    many = {f"brand_new_{index}": 1 for index in range(64)}
    with pytest.raises(QuireError, match="more than 64"):
        UndefinedFields.WARN.check(OllamaChatBody, {"other": 1, "options": many})
    with pytest.raises(QuireError) as raised:
        UndefinedFields.REFUSE.check(OllamaChatBody, {"options": {"brand_new": 1}})
    assert raised.value.field == "options.brand_new"


@pytest.mark.parametrize("model", [ResponsesBody, MessagesBody, OllamaChatBody, OllamaGenerateBody])
def test_bodies_of_every_protocol_know_the_fields_of_the_others(model: type[BodyModel]) -> None:
    """A field that Quire serves elsewhere is never ignored: it is served, without effect, or refused by name."""
    assert model.known_fields() >= ChatBody.known_fields() | CompletionBody.known_fields()
    assert not model.served_fields() & model.unserved.keys()
    assert not model.served_fields() & model.without_effect.keys()
    assert not model.unserved.keys() & model.without_effect.keys()


def test_all_may_be_refused_or_ignored() -> None:
    with pytest.raises(QuireError) as raised:
        UndefinedFields.REFUSE.check(CompletionBody, {"prompt": "a", "brand_new": 1})
    assert raised.value.field == "brand_new"
    assert UndefinedFields.IGNORE.check(CompletionBody, {"prompt": "a", "brand_new": 1, "temprature": 1}) == ()


def test_a_body_has_a_bounded_number_of_them() -> None:
    many = {f"brand_new_{index}": 1 for index in range(65)}
    with pytest.raises(QuireError, match="more than 64") as raised:
        UndefinedFields.WARN.check(CompletionBody, many)
    assert raised.value.field == "brand_new_64"
    assert len(UndefinedFields.WARN.check(CompletionBody, dict(list(many.items())[:64]))) == 64


def test_a_name_in_an_error_is_short_and_printable() -> None:
    with pytest.raises(QuireError) as raised:
        UndefinedFields.REFUSE.check(CompletionBody, {"\ud800" + "x" * 10_000: 1})
    text = str(raised.value)
    assert len(text.encode()) < 1_000


def test_the_headers_value_is_safe() -> None:
    assert header_value(["a", "b-c.d_9"]) == "a, b-c.d_9"
    assert header_value(["a\r\nset-cookie: b", "é\ud800,"]) == "a??set-cookie??b, ???"
    longest = header_value(["x" * 10_000] * 64)
    assert longest.isascii()
    assert len(longest) == 1_024
    assert longest.startswith("x" * 64 + ", ")


def test_all_fields_of_openais_api_are_known() -> None:
    assert typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming).keys() <= (
        CompletionBody.known_fields()
    )
    assert typing.get_type_hints(chat_create_params.CompletionCreateParamsStreaming).keys() <= ChatBody.known_fields()
    assert typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys() <= (
        ResponsesBody.known_fields()
    )


@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
def test_a_field_is_served_or_not_served_or_without_effect(model: type[CompletionBody]) -> None:
    served = {field.alias or name for name, field in model.model_fields.items()}
    assert not served & model.unserved.keys()
    assert not served & model.without_effect.keys()
    assert not model.unserved.keys() & model.without_effect.keys()
