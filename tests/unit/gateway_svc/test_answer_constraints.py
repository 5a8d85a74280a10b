"""The limit of the reasoning: which answers have it."""

import pytest

from gateway_svc.answer_constraints import answer_constraint, digest_of_form
from gateway_svc.chats import ChatPrompt
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import contract_field_path
from gateway_svc.message_formats.description import MessageFormat
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.turn_constraints import TurnConstraint
from gateway_svc.turn_format import TurnFormat
from gateway_svc.unvalidated_request import EndOfText, UnvalidatedRequest
from svc_common.errors import QuireError, Reason

CHECK = FieldChecker(contract_field_path)
WITHOUT_REASONING = TurnFormat(MessageFormat(TOOL_FORMATS["hermes"], None))
WITH_REASONING = TurnFormat(MessageFormat(None, REASONING_FORMATS["think"]))
TOKENS = {"<think>": 300, "</think>": 301}


def limited(limit: int | None) -> UnvalidatedRequest:
    return UnvalidatedRequest(prompt=ChatPrompt([], max_reasoning_tokens=limit))


def test_a_limit_is_a_constraint_of_its_own() -> None:
    constraint = answer_constraint(limited(7), WITH_REASONING, TOKENS, CHECK)
    assert isinstance(constraint, TurnConstraint)
    assert (constraint.max_reasoning_tokens, constraint.field) == (7, "chat.max_reasoning_tokens")
    assert answer_constraint(limited(None), WITH_REASONING, TOKENS, CHECK) is None


def test_a_model_that_does_not_reason_has_no_limit() -> None:
    assert answer_constraint(limited(7), WITHOUT_REASONING, TOKENS, CHECK) is None
    assert answer_constraint(limited(7), None, TOKENS, CHECK) is None


def test_a_limit_may_be_ignored_where_it_cannot_be_held() -> None:
    prompt = ChatPrompt([], max_reasoning_tokens=7, must_limit_reasoning=False)
    request = UnvalidatedRequest(prompt=prompt)
    assert answer_constraint(request, WITH_REASONING, {}, CHECK) is None
    assert answer_constraint(request, WITH_REASONING, TOKENS, CHECK) is not None


@pytest.mark.parametrize(
    ("tokens", "end_of_text", "field"),
    [({}, EndOfText.ENDS, "chat.max_reasoning_tokens"), (TOKENS, EndOfText.IGNORED, "stopping.ignore_eos")],
)
def test_where_a_limit_is_refused(tokens: dict[str, int], end_of_text: EndOfText, field: str) -> None:
    request = UnvalidatedRequest(prompt=ChatPrompt([], max_reasoning_tokens=0), end_of_text=end_of_text)
    with pytest.raises(QuireError) as error:
        answer_constraint(request, WITH_REASONING, tokens, CHECK)
    assert (error.value.reason, error.value.field) == (Reason.FEATURE_UNSUPPORTED, field)


def test_the_same_request_has_the_same_limit() -> None:
    digests = {digest_of_form(limited(limit)) for limit in (None, 0, 1)}
    assert len(digests) == 3
    assert "" in digests
