"""Bodies of the OpenAI API."""

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.chats import ChatMessage, ChatPrompt
from gateway_svc.field_paths import Field
from gateway_svc.http_api.json_body import parse_body
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.answer_options import AnswerOptions
from gateway_svc.http_api.openai.bodies import Delivery, ReadBody, read_chat_completion, read_completion
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.unvalidated_request import EndOfText, TextPrompt, TokenPrompt, UnvalidatedBeamSearch
from gateway_svc.validated_request import EarlyStopping, SpecialTokens, StopText
from svc_common.errors import QuireError, Reason

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> ReadBody:
    return read_completion(CompletionBody.read(parse_body(json.dumps({"prompt": "a"} | fields).encode())), None)


def chat(**fields: Any) -> ReadBody:
    return read_chat_completion(ChatBody.read(parse_body(json.dumps({"messages": MESSAGES} | fields).encode())), None)


def refused(read: Callable[..., ReadBody], **fields: Any) -> tuple[Reason, str | None]:
    with pytest.raises(QuireError) as error:
        read(**fields)
    return error.value.reason, error.value.field


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1, 2], [3]], [TokenPrompt([1, 2]), TokenPrompt([3])]),
        (["a", [1]], [TextPrompt("a"), TokenPrompt([1])]),
        ([], [TokenPrompt([])]),
        (None, [None]),
    ],
)
def test_prompts_of_all_kinds(prompt: Any, expected: list[Any]) -> None:
    assert [asked.unvalidated.prompt for asked in completion(prompt=prompt).prompts] == expected


def test_texts_and_chats_without_or_with_the_tokenizers_special_tokens() -> None:
    bare = completion(prompt=["a", [1]], add_special_tokens=False).prompts
    assert [one.unvalidated.prompt for one in bare] == [TextPrompt("a", add_special_tokens=False), TokenPrompt([1])]
    (prompt,) = chat(add_special_tokens=True).prompts
    assert isinstance(prompt.unvalidated.prompt, ChatPrompt)
    assert prompt.unvalidated.prompt.add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (7, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([1, True], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], [2, "b"]], "prompt[1][1]"),
        ([None], "prompt[0]"),
        (["a"] * 1_025, "prompt"),
    ],
)
def test_other_prompts_are_refused_by_their_place(prompt: Any, field: str) -> None:
    assert refused(completion, prompt=prompt) == (Reason.INVALID_FIELD, field)


def test_each_of_several_prompts_has_its_own_name() -> None:
    second = completion(prompt=["a", "b"]).prompts[1]
    assert second.field_path(Field.TEXT) == "prompt[1]"
    assert second.field_path(Field.TOKEN_IDS, 3) == "prompt[1][3]"


def test_content_may_come_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).prompts[0].unvalidated.prompt == ChatPrompt(
        [ChatMessage("system", "s"), ChatMessage("user", "a\nb")]
    )


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        ("a", Reason.INVALID_FIELD, "messages[1]"),
        ({"content": "a"}, Reason.INVALID_FIELD, "messages[1].role"),
        ({"role": 1, "content": "a"}, Reason.INVALID_FIELD, "messages[1].role"),
        ({"role": "user"}, Reason.INVALID_FIELD, "messages[1].content"),
        ({"role": "user", "content": 1}, Reason.INVALID_FIELD, "messages[1].content"),
        ({"role": "user", "content": []}, Reason.INVALID_FIELD, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, Reason.INVALID_FIELD, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, Reason.INVALID_FIELD, "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            Reason.FEATURE_UNSUPPORTED,
            "messages[1].content[0].type",
        ),
        ({"role": "assistant", "content": "a", "audio": {"id": "b"}}, Reason.FEATURE_UNSUPPORTED, "messages[1].audio"),
    ],
)
def test_messages_are_refused_by_their_place(message: Any, reason: Reason, field: str) -> None:
    assert refused(chat, messages=[*MESSAGES, message]) == (reason, field)


def test_messages_must_be_a_list() -> None:
    assert refused(chat, messages="hi") == (Reason.INVALID_FIELD, "messages")


WRONG_TYPES = {
    "number": (["temperature", "top_p", "min_p", "length_penalty", "repetition_penalty"], ["1", True, [], {}]),
    "integer": (
        ["max_tokens", "max_completion_tokens", "n", "best_of", "seed", "top_k", "min_tokens"],
        ["1", True, 1.5, 1.0, []],
    ),
    "flag": (
        ["stream", "use_beam_search", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"],
        ["true", 1, 0, []],
    ),
    "string": (["model"], [1, True, []]),
    "list": (["stop", "stop_token_ids"], [1, True, {}]),
    "object": (["logit_bias", "stream_options"], [1, True, [1]]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for names, values in WRONG_TYPES.values() for name in names for value in values],
)
def test_wrong_types_are_refused_by_name(name: str, value: Any) -> None:
    for read in (completion, chat):
        assert refused(read, **{name: value}) == (Reason.INVALID_FIELD, name)


@pytest.mark.parametrize("token_id", ["a", "-1", "1.0", "", " 1", "٣", "9" * 30])
def test_names_in_logit_bias_are_token_ids(token_id: str) -> None:
    assert refused(completion, logit_bias={token_id: 1}) == (Reason.INVALID_FIELD, "logit_bias")


def test_an_error_of_logit_bias_has_the_names_that_are_none() -> None:
    wrong = [f"bad{number}" for number in range(9)]
    with pytest.raises(QuireError) as error:
        completion(logit_bias=dict.fromkeys(["5", *wrong], 1))
    assert all(repr(name) in str(error.value) for name in wrong[:8])
    assert "bad8" not in str(error.value)


def test_nan_is_refused_by_the_name_of_its_field_or_else_with_the_body() -> None:
    assert refused(completion, temperature=math.nan) == (Reason.INVALID_FIELD, "temperature")
    assert refused(completion, top_p=math.inf) == (Reason.INVALID_FIELD, "top_p")
    assert refused(completion, nobody_defines_this=math.nan) == (Reason.MALFORMED_MESSAGE, None)
    assert refused(chat, messages=[{"role": "user", "content": "a", "x": -math.inf}]) == (
        Reason.MALFORMED_MESSAGE,
        None,
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"{'a': 1}",
        b"\xff\xfe\x00",
        b'{"a": ' + b"[" * 100_000,
        b'{"n": ' + b"1" * 5_000,
    ],
)
def test_what_is_no_json_object_is_malformed(data: bytes) -> None:
    with pytest.raises(QuireError) as error:
        parse_body(data)
    assert error.value.reason is Reason.MALFORMED_MESSAGE


UNSERVED = [
    (read, name, neutral) for read, table in ((completion, unsupported_fields.COMPLETION), (chat,
    unsupported_fields.CHAT)) for name, neutral in table.items()
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "neutral"), UNSERVED)
def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(
    read: Callable[..., ReadBody], name: str, neutral: list[Any]
) -> None:
    assert refused(read, **{name: "something"}) == (Reason.FEATURE_UNSUPPORTED, name)
    for value in (None, *neutral):
        assert read(**{name: value})


@pytest.mark.parametrize(
    ("read", "fields", "name"),
    [
        (chat, {"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (chat, {"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ],
)
def test_values_that_ask_for_what_is_not_served(
    read: Callable[..., ReadBody], fields: dict[str, Any], name: str
) -> None:
    assert refused(read, **fields) == (Reason.FEATURE_UNSUPPORTED, name)


def test_fields_that_nobody_defines_are_ignored() -> None:
    assert completion(some_field={"a": [1]}) == completion()


@pytest.mark.parametrize("name", unsupported_fields.WITHOUT_EFFECT)
def test_fields_without_an_effect_are_accepted(name: str) -> None:
    assert completion(**{name: {"any": "value"}}) == completion()
    assert chat(**{name: {"any": "value"}}) == chat()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, EarlyStopping.HEURISTIC),
        (True, EarlyStopping.AT_WIDTH),
        ("never", EarlyStopping.NEVER),
    ],
)
def test_a_beam_search_as_vllm_spells_it(value: Any, expected: EarlyStopping | None) -> None:
    for read in (completion, chat):
        unvalidated = (
            read(use_beam_search=True, best_of=4, n=2, length_penalty=2, early_stopping=value).prompts[0].unvalidated
        )
        assert unvalidated.beam_search == UnvalidatedBeamSearch(4, 2.0, expected)
        assert (unvalidated.n, unvalidated.best_of) == (2, None)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}, [True]])
def test_early_stopping_is_one_of_three(value: Any) -> None:
    assert refused(completion, early_stopping=value) == (Reason.INVALID_FIELD, "early_stopping")


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_fields_of_a_beam_search_need_one(name: str, value: Any) -> None:
    assert refused(completion, **{name: value}) == (Reason.INVALID_FIELD, name)


def test_fields_of_a_beam_search_that_ask_for_none_are_none() -> None:
    asked = completion(use_beam_search=False, best_of=1, length_penalty=1.0, early_stopping=False).prompts[0]
    assert (asked.unvalidated.beam_search, asked.unvalidated.best_of) == (None, 1)


def test_the_newer_name_of_max_tokens_holds() -> None:
    (asked,) = chat(max_tokens=1, max_completion_tokens=2).prompts
    assert asked.unvalidated.max_tokens == 2
    assert asked.field_path(Field.MAX_TOKENS) == "max_completion_tokens"
    assert chat(max_tokens=1).prompts[0].field_path(Field.MAX_TOKENS) == "max_tokens"


def test_only_completions_have_a_default_length() -> None:
    assert completion().prompts[0].unvalidated.default_max_tokens == 16
    assert chat().prompts[0].unvalidated.default_max_tokens is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], expected: int | None) -> None:
    (asked,) = chat(**fields).prompts
    assert asked.unvalidated.logprobs == expected
    assert asked.field_path(Field.LOGPROBS) == "top_logprobs"


def test_top_logprobs_need_logprobs() -> None:
    assert refused(chat, top_logprobs=1) == (Reason.INVALID_FIELD, "top_logprobs")


def test_logprobs_of_completions() -> None:
    assert completion(logprobs=0).prompts[0].unvalidated.logprobs == 0
    assert refused(completion, logprobs=True) == (Reason.INVALID_FIELD, "logprobs")


def test_flags_become_what_they_mean() -> None:
    unvalidated = (
        completion(ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False).prompts[0].unvalidated
    )
    assert unvalidated.end_of_text is EndOfText.IGNORED
    assert unvalidated.stop_text is StopText.INCLUDED
    assert unvalidated.special_tokens is SpecialTokens.KEPT
    assert completion(skip_special_tokens=True).prompts[0].unvalidated.special_tokens is SpecialTokens.HIDDEN


@pytest.mark.parametrize(
    ("fields", "delivery"),
    [
        ({}, Delivery.WHOLE),
        ({"stream": True}, Delivery.STREAM),
        ({"stream": True, "stream_options": {"include_usage": False}}, Delivery.STREAM),
        ({"stream": True, "stream_options": {"include_usage": True}}, Delivery.STREAM_WITH_USAGE),
    ],
)
def test_ways_to_answer(fields: dict[str, Any], delivery: Delivery) -> None:
    assert chat(**fields).delivery is delivery


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, AnswerOptions()),
        ({"return_token_ids": True}, AnswerOptions(has_token_ids=True)),
        ({"return_tokens_as_token_ids": True}, AnswerOptions(names_tokens_by_id=True)),
        ({"service_tier": "flex"}, AnswerOptions(service_tier="default")),
        (
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            AnswerOptions(has_running_usage=True),
        ),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, AnswerOptions()),
    ],
)
def test_options_of_the_answer(fields: dict[str, Any], options: AnswerOptions) -> None:
    assert chat(**fields).options == completion(**fields).options == options


def test_stream_options_need_a_stream() -> None:
    assert refused(chat, stream_options={"include_usage": True}) == (Reason.INVALID_FIELD, "stream_options")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KNOWN = [
    "prompt",
    "messages",
    "stop",
    "n",
    "logprobs",
    "logit_bias",
    "stream",
    "stream_options",
    "temperature",
    "tools",
]


@given(st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), json_values, max_size=5))
def test_any_object_is_read_or_refused(fields: dict[str, Any]) -> None:
    body = parse_body(json.dumps(fields).encode())
    # Any exception but QuireError is a defect.
    with contextlib.suppress(QuireError):
        assert read_completion(CompletionBody.read(body), None).prompts
    with contextlib.suppress(QuireError):
        assert read_chat_completion(ChatBody.read(body), None).prompts
