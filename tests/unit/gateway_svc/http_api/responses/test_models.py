"""Fields of the body of a response."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway_svc.http_api.responses.models import ResponsesBody
from svc_common.errors import QuireError, Reason


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"guided_regex": "a"},
        {"logprobs": True},
        {"best_of": 2},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
        {"return_token_ids": True},
        {"suffix": "a"},
        {"system": "a"},
        {"messages": []},
        {"n": 2},
    ],
    ids=str,
)
def test_fields_that_other_bodies_serve_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(QuireError) as raised:
        ResponsesBody.of({"input": "a", **fields})
    assert (raised.value.reason, raised.value.field) == (Reason.FEATURE_UNSUPPORTED, next(iter(fields)))


def test_they_are_accepted_where_they_are_off() -> None:
    off = {
        "echo": False,
        "logprobs": False,
        "use_beam_search": False,
        "return_token_ids": False,
        "suffix": "",
        "n": 1,
        "service_tier": "auto",
        "keep_alive": "5m",
    }
    assert ResponsesBody.of({"input": "a", **off}) == ResponsesBody.of({"input": "a"})


@pytest.mark.parametrize(("name", "neutral"), ResponsesBody.unserved.items())
def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(
    name: str, neutral: Sequence[Any]
) -> None:
    with pytest.raises(QuireError) as raised:
        ResponsesBody.of({"input": "a", name: "something"})
    assert (raised.value.reason, raised.value.field) == (Reason.FEATURE_UNSUPPORTED, name)
    for value in (None, *neutral):
        assert ResponsesBody.of({"input": "a", name: value}) == ResponsesBody.of({"input": "a"})


@pytest.mark.parametrize("name", ResponsesBody.without_effect)
def test_fields_without_an_effect_are_accepted(name: str) -> None:
    assert ResponsesBody.of({"input": "a", name: {"any": "value"}}) == ResponsesBody.of({"input": "a"})


def test_options_of_the_prompt_cache_have_no_effect_but_a_prompt_is_not_computed_alone() -> None:
    ResponsesBody.of({"input": "a", "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False}})
    for fields in ({"prewarm": True}, {"comparison_response_id": "resp_1"}):
        with pytest.raises(QuireError) as raised:
            ResponsesBody.of({"input": "a", "prompt_cache_options": fields})
        assert raised.value.field == f"prompt_cache_options.{next(iter(fields))}"


@pytest.mark.parametrize(
    "metadata",
    [{str(index): "a" for index in range(17)}, {"a" * 65: "a"}, {"a": "a" * 513}, {"a": 1}],
    ids=["entries", "name", "value", "number"],
)
def test_notes_of_the_client_are_bounded(metadata: dict[str, Any]) -> None:
    ResponsesBody.of({"input": "a", "metadata": {"a" * 64: "a" * 512}})
    with pytest.raises(QuireError, match="metadata: must have"):
        ResponsesBody.of({"input": "a", "metadata": metadata})


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed", None])
def test_a_summary_may_be_requested(summary: str | None) -> None:
    """Items have the reasoning itself, which is more."""
    body = ResponsesBody.of({"input": "a", "reasoning": {"summary": summary, "generate_summary": summary}})
    assert body.reasoning is not None


def test_other_options_are_refused_or_accepted() -> None:
    with pytest.raises(QuireError, match=r"reasoning\.summary"):
        ResponsesBody.of({"input": "a", "reasoning": {"summary": "long"}})
    ResponsesBody.of({"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}})
    with pytest.raises(QuireError, match=r"text\.verbosity"):
        ResponsesBody.of({"input": "a", "text": {"verbosity": "low"}})
    ResponsesBody.of({"input": "a", "text": {"verbosity": "medium"}})


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
def test_names_that_come_back_are_bounded(name: str) -> None:
    ResponsesBody.of({"input": "a", name: "a" * 1024})
    with pytest.raises(QuireError, match=f"{name}: must have at most 1024 characters"):
        ResponsesBody.of({"input": "a", name: "a" * 1025})
