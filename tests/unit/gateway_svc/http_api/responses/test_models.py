"""Fields of the body of a response."""

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


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed", None])
def test_a_summary_may_be_requested(summary: str | None) -> None:
    """Items have the reasoning itself, which is more."""
    body = ResponsesBody.of({"input": "a", "reasoning": {"summary": summary, "generate_summary": summary}})
    assert body.reasoning is not None


def test_other_options_are_refused_or_accepted() -> None:
    with pytest.raises(QuireError, match=r"reasoning\.summary"):
        ResponsesBody.of({"input": "a", "reasoning": {"summary": "long"}})
    ResponsesBody.of({"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}})
