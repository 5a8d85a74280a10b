"""Bodies of /tokenize."""

from typing import Any

import pytest

from gateway_svc.chats import ChatMessage, ChatPrompt, PromptEnd
from gateway_svc.http_api.tokenizing.models import TokenizeBody
from gateway_svc.http_api.tokenizing.routes import read_tokenize
from gateway_svc.unvalidated_request import TextPrompt
from svc_common.errors import QuireError, Reason

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_text() -> None:
    read = read_tokenize(TokenizeBody.of({"prompt": "a", "model": "m", "return_token_strs": True}))
    assert (read.model, read.prompt, read.return_token_strs) == ("m", TextPrompt("a"), True)
    bare = read_tokenize(TokenizeBody.of({"prompt": "a", "add_special_tokens": False}))
    assert bare.prompt == TextPrompt("a", add_special_tokens=False)


def test_a_chat_with_the_fields_of_a_chat_completion() -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": False, "max_tokens": 5, "stream": True}
    read = read_tokenize(TokenizeBody.of(body))
    assert read.prompt == ChatPrompt([ChatMessage("user", "hi")], prompt_end=PromptEnd.MESSAGE)
    read = read_tokenize(TokenizeBody.of({"messages": MESSAGES, "add_special_tokens": True}))
    assert read.prompt == ChatPrompt([ChatMessage("user", "hi")], add_special_tokens=True)


@pytest.mark.parametrize(
    ("body", "reason", "field"),
    [
        ({}, Reason.INVALID_FIELD, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, Reason.INVALID_FIELD, "messages"),
        ({"prompt": ["a"]}, Reason.INVALID_FIELD, "prompt"),
        ({"messages": MESSAGES, "add_special_tokens": 1}, Reason.INVALID_FIELD, "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template": "x"}, Reason.FEATURE_UNSUPPORTED, "chat_template"),
        ({"messages": [{"role": "user", "content": 1}]}, Reason.INVALID_FIELD, "messages[0].content"),
    ],
    ids=["nothing", "both", "a list", "special tokens", "a template", "content"],
)
def test_other_bodies_are_refused(body: dict[str, Any], reason: Reason, field: str) -> None:
    with pytest.raises(QuireError) as error:
        read_tokenize(TokenizeBody.of(body))
    assert (error.value.reason, error.value.field) == (reason, field)
