"""Bodies of responses as requests to the validator."""

from typing import Any

import pytest

from gateway_svc.chats import ChatMessage, ChatPrompt, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field
from gateway_svc.http_api.responses.models import ResponsesBody
from gateway_svc.http_api.responses.request import ResponseName, ResponseRequest
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.retention import NONE
from gateway_svc.unvalidated_request import EndOfText, ResponseMode, UnvalidatedRequest
from gateway_svc.validated_request import SpecialTokens, StopText
from gateway_values import make_generation
from svc_common.errors import QuireError


def request_of(**fields: Any) -> ResponseRequest:
    return ResponseRequest.of(ResponsesBody.of({"input": "Hi", **fields}), ResponseName("resp_1"), [])


def read(**fields: Any) -> UnvalidatedRequest:
    request = request_of(**fields)
    return request.prompt(request.messages).unvalidated


def test_parameters_of_sampling_and_stopping() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "typical_p": 0.8,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    }
    assert read(
        **sampling,
        model="m",
        instructions="Be brief.",
        seed=3,
        logit_bias={"5": 2},
        bad_words=["no"],
        max_output_tokens=7,
        min_tokens=2,
        stop=["end"],
        include_stop_str_in_output=True,
        stop_token_ids=[9],
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        top_logprobs=2,
        priority=1,
    ) == UnvalidatedRequest(
        prompt=ChatPrompt([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi", path="input")]),
        model="m",
        sampling=sampling,
        seed=3,
        logit_bias={5: 2.0},
        bad_words=["no"],
        max_tokens=7,
        min_tokens=2,
        stop=["end"],
        stop_text=StopText.INCLUDED,
        stop_token_ids=[9],
        end_of_text=EndOfText.IGNORED,
        logprobs=2,
        request_id="resp_1",
        priority=1,
        special_tokens=SpecialTokens.of(is_kept=True, has_spaces=False),
        response_mode=ResponseMode.WHOLE,
    )


def test_options_of_the_chat() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    request = read(
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        chat_template_kwargs={"a": 1},
    )
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["f"]
    assert prompt.tool_choice == ToolChoice(ToolMode.REQUIRED)
    assert prompt.parallel_tool_calls is False
    assert (prompt.reasoning_effort, prompt.template_variables) == ("low", '{"a": 1}')


def test_a_constraint_is_that_of_the_text_or_vllms() -> None:
    for fields, constraint in (
        ({"structured_outputs": {"regex": "a+"}}, UnvalidatedConstraint(Field.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, UnvalidatedConstraint(Field.CHOICE, choices=("a", "b"))),
        ({"text": {"format": {"type": "json_object"}}}, UnvalidatedConstraint(Field.JSON_OBJECT)),
        ({"text": {"format": {"type": "text"}}}, None),
    ):
        assert read(**fields).constraint == constraint
    request = request_of(structured_outputs={"json": {}})
    assert request.prompt(request.messages).field_path(Field.JSON_SCHEMA) == "structured_outputs.json"
    with pytest.raises(QuireError) as error:
        read(text={"format": {"type": "json_object"}}, structured_outputs={"regex": "a"})
    assert error.value.field == "structured_outputs.regex"


@pytest.mark.parametrize("value", [True, None, False])
def test_whether_reasoning_is_shown_is_stored(value: bool | None) -> None:
    request = request_of(include_reasoning=value)
    stored = request.stored(make_generation(), 1)
    assert stored.hides_reasoning is (value is False)
    assert StoredResponse.from_bytes(stored.to_bytes()) == stored


def test_a_response_without_storage_has_no_name_and_no_record() -> None:
    request = read(store=False, stream=True)
    assert (request.request_id, request.retention, request.response_mode) == (None, NONE, ResponseMode.STREAMED)
    for fields, name in (
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
    ):
        with pytest.raises(QuireError) as error:
            read(**fields)
        assert error.value.field == name


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "grammar", "syntax": "regex", "definition": "a"}])
def test_a_custom_tool_is_written_into_the_response_as_it_came(form: dict[str, Any]) -> None:
    tool = {"type": "custom", "name": "run", "description": "Runs.", "format": form}
    tools = request_of(tools=[tool]).body.tools or []
    assert [one.model_dump(by_alias=True) for one in tools] == [tool]
