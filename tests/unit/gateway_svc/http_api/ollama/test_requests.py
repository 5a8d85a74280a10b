"""Bodies of Ollama's API."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, ToolCall
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.embeddings import Normalization, UnvalidatedEmbeddings
from gateway_svc.field_paths import Field
from gateway_svc.http_api.ollama.models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from gateway_svc.http_api.ollama.requests import (
    OllamaRequest,
    read_chat,
    read_embed,
    read_embeddings_prompt,
    read_generate,
)
from gateway_svc.unvalidated_request import InfillPrompt, ResponseMode, TextPrompt, UnvalidatedRequest
from svc_common.errors import QuireError, Reason

USER = {"role": "user", "content": "Hi."}


def chat(**fields: Any) -> OllamaRequest:
    return read_chat(OllamaChatBody.of({"messages": [USER]} | fields), None)


def messages(*given: Any) -> Any:
    prompt = chat(messages=[USER, *given]).prompt.unvalidated.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[1:]


def generate(**fields: Any) -> OllamaRequest:
    return read_generate(OllamaGenerateBody.of({"prompt": "Hi."} | fields), None)


def embed(**fields: Any) -> UnvalidatedEmbeddings:
    return read_embed(OllamaEmbedBody.of({"input": "Hi."} | fields))


def embed_prompt(**fields: Any) -> UnvalidatedEmbeddings:
    return read_embeddings_prompt(OllamaEmbeddingsBody.of({"prompt": "Hi."} | fields))


def test_options_are_sampling_and_stopping() -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 3,
        "stop": ["END"],
        "num_ctx": 4096,
        "repeat_last_n": 64,
    }
    read = chat(model="m", options=options, keep_alive="5m")
    assert read.is_streamed
    assert read.prompt.unvalidated == UnvalidatedRequest(
        prompt=ChatPrompt([ChatMessage("user", "Hi.")]),
        model="m",
        sampling={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "typical_p": 0.8,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
        },
        seed=3,
        max_tokens=7,
        stop=["END"],
        response_mode=ResponseMode.STREAMED,
    )
    path = read.prompt.field_path
    assert path("sampling.repetition_penalty") == "options.repeat_penalty"
    assert (path(Field.STOP, 0), path(Field.MAX_TOKENS)) == ("options.stop[0]", "options.num_predict")
    assert chat(options={"stop": "END"}).prompt.field_path(Field.STOP, 0) == "options.stop"


@pytest.mark.parametrize(("name", "neutral"), OllamaOptions.unserved.items())
def test_options_that_are_not_served_are_refused_unless_they_are_the_default(name: str, neutral: Sequence[Any]) -> None:
    with pytest.raises(QuireError) as error:
        chat(options={name: "something"})
    assert (error.value.reason, error.value.field) == (Reason.FEATURE_UNSUPPORTED, f"options.{name}")
    for value in (None, *neutral):
        assert chat(options={name: value}).prompt.unvalidated == chat(options={}).prompt.unvalidated


@pytest.mark.parametrize("read", [chat, generate])
def test_log_probabilities(read: Any) -> None:
    for fields, expected in (
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ):
        assert read(**fields).prompt.unvalidated.logprobs == expected
    with pytest.raises(QuireError) as raised:
        read(top_logprobs=3)
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, "top_logprobs")


@pytest.mark.parametrize("name", OllamaOptions.without_effect)
def test_options_without_an_effect_are_accepted(name: str) -> None:
    assert chat(options={name: {"any": "value"}}).prompt.unvalidated == chat(options={}).prompt.unvalidated


@pytest.mark.parametrize(
    ("read", "name"),
    [(chat, name) for name in OllamaChatBody.without_effect]
    + [(generate, name) for name in OllamaGenerateBody.without_effect],
)
def test_fields_without_an_effect_are_accepted(read: Any, name: str) -> None:
    assert read(**{name: {"any": "value"}}).prompt.unvalidated == read().prompt.unvalidated


@pytest.mark.parametrize(
    ("read", "name", "neutral"),
    [(chat, name, neutral) for name, neutral in OllamaChatBody.unserved.items()]
    + [(generate, name, neutral) for name, neutral in OllamaGenerateBody.unserved.items()],
)
def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(
    read: Any, name: str, neutral: Sequence[Any]
) -> None:
    with pytest.raises(QuireError) as error:
        read(**{name: "something"})
    assert (error.value.reason, error.value.field) == (Reason.FEATURE_UNSUPPORTED, name)
    for value in (None, *neutral):
        assert read(**{name: value}).prompt.unvalidated == read().prompt.unvalidated


def test_an_answer_is_whole_if_requested() -> None:
    read = chat(stream=False, options={"num_predict": -1})
    assert not read.is_streamed
    assert read.prompt.unvalidated.response_mode is ResponseMode.WHOLE
    assert read.prompt.unvalidated.max_tokens is None


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"a": 1}}, **more}


def test_results_are_of_the_next_call_of_their_tool() -> None:
    assistant = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call("f"), call("g"), call("f")]}
    calls = [ToolCall(name, '{"a": 1}', f"call_1_{index}") for index, name in enumerate("fgf")]
    assert messages(
        assistant,
        {"role": "tool", "content": "1", "tool_name": "f"},
        {"role": "tool", "content": "2", "tool_name": "f"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
    ) == [
        ChatMessage("assistant", None, tuple(calls), reasoning="Hm."),
        ChatMessage("tool", "1", tool_call_id="call_1_0", name="f"),
        ChatMessage("tool", "2", tool_call_id="call_1_2", name="f"),
        ChatMessage("tool", "3", tool_call_id="call_1_1"),
        ChatMessage("tool", "4", tool_call_id="x"),
    ]
    assert messages({"role": "assistant", "tool_calls": [call("f", id="own")]})[0].tool_calls[0].id == "own"


def test_results_find_their_calls_in_time_linear_in_the_messages() -> None:
    def called(name: str) -> OllamaMessage:
        return OllamaMessage.of({"role": "assistant", "tool_calls": [{"function": {"name": name}}]})

    def result(name: str | None) -> OllamaMessage:
        return OllamaMessage.of({"role": "tool", "content": "", "tool_name": name})

    count = 3_000
    given = [[called("f"), called("g")], [result("h"), result("g")], [result(None)]]
    body = OllamaChatBody(messages=[message for some in given for message in some * count])
    began = time.process_time()
    prompt = read_chat(body, None).prompt.unvalidated.prompt
    assert time.process_time() - began < 3  # a scan of the calls for each result takes several times as long
    assert isinstance(prompt, ChatPrompt)
    read = [one.tool_call_id for one in prompt.messages[2 * count :]]
    assert read[: 2 * count] == [at for index in range(count) for at in (None, f"call_{2 * index + 1}_0")]
    assert read[2 * count :] == [f"call_{2 * index}_0" for index in range(count)]


def test_tools() -> None:
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    prompt = chat(tools=[{"type": "function", "function": function}]).prompt.unvalidated.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (ClientTool("f", "F.", '{"type": "object"}'),)


@pytest.mark.parametrize(
    ("think", "effort"), [(None, None), (False, "none"), (True, "medium"), ("low", "low"), ("high", "high")]
)
def test_think_is_an_effort(think: Any, effort: str | None) -> None:
    for read in (chat(think=think), generate(think=think)):
        prompt = read.prompt.unvalidated.prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.reasoning_effort == effort


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ("", None),
        ("json", UnvalidatedConstraint(Field.JSON_OBJECT)),
        ({"type": "object"}, UnvalidatedConstraint(Field.JSON_SCHEMA, '{"type": "object"}')),
    ],
)
def test_a_format_is_a_constraint(form: Any, constraint: UnvalidatedConstraint | None) -> None:
    assert chat(format=form).prompt.unvalidated.constraint == constraint


def test_a_prompt_is_a_message_unless_it_is_raw() -> None:
    assert generate(system="Be brief.").prompt.unvalidated.prompt == ChatPrompt(
        [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi.")]
    )
    assert generate(raw=True).prompt.unvalidated.prompt == TextPrompt("Hi.")


def test_a_prompt_with_a_suffix_has_a_gap_also_at_its_beginning() -> None:
    assert generate(suffix=" there").prompt.unvalidated.prompt == InfillPrompt("Hi.", " there")
    at_begin = generate(prompt="", suffix=" there")
    assert (at_begin.prompt.unvalidated.prompt, at_begin.loads) == (InfillPrompt("", " there"), False)
    assert at_begin.prompt.field_path(Field.SUFFIX) == "suffix"


def test_fields_of_the_other_route_are_accepted_where_they_are_empty() -> None:
    assert not chat(prompt="", system="", raw=False, suffix="").loads
    assert not generate(messages=[], tools=[]).loads


def test_a_body_without_a_prompt_loads_the_model() -> None:
    assert chat(messages=[]).loads
    assert generate(prompt="").loads
    assert not generate().loads


def test_texts_are_inputs() -> None:
    for value, fields in (("a", ["input"]), (["a"], ["input[0]"]), (["a", "b"], ["input[0]", "input[1]"])):
        read = embed(input=value, model="m", dimensions=4)
        assert [one.prompt for one in read.inputs] == [TextPrompt("a"), TextPrompt("b")][: len(fields)]
        assert [one.field_path(Field.TEXT) for one in read.inputs] == fields
        assert (read.model, read.dimensions, read.normalization) == ("m", 4, Normalization.L2)
    read = embed_prompt(model="m")
    (one,) = read.inputs
    assert (one.prompt, one.field_path(Field.TEXT)) == (TextPrompt("Hi."), "prompt")
    assert (read.model, read.dimensions, read.normalization) == ("m", None, Normalization.NONE)


def test_texts_are_cut_to_the_context_unless_that_is_refused() -> None:
    for read in (embed, embed_prompt):
        assert [read(truncate=value).truncate_prompt_tokens for value in (None, True, False)] == [-1, -1, None]
        for one in (read(), read().inputs[0]):
            assert one.field_path(Field.TRUNCATE_PROMPT_TOKENS) == "truncate"


def test_a_call_without_texts_has_no_inputs() -> None:
    values: list[Any] = [None, "", []]
    for value in values:
        assert not embed(input=value).inputs
    assert not embed_prompt(prompt="").inputs


def test_fields_that_change_no_vector_are_accepted() -> None:
    fields = {
        "options": {"num_ctx": 8, "temperature": 3, "stop": 1, "mirostat": 1},
        "keep_alive": "5m",
        "stream": False,
    }
    assert embed(**fields).inputs
    assert embed_prompt(**fields).inputs


@pytest.mark.parametrize(
    ("read", "fields", "reason", "field"),
    [
        (chat, {"messages": [{**USER, "images": ["a"]}]}, Reason.FEATURE_UNSUPPORTED, "messages[0].images"),
        (chat, {"messages": [{"content": "a"}]}, Reason.INVALID_FIELD, "messages[0].role"),
        (chat, {"options": {"mirostat": 1}}, Reason.FEATURE_UNSUPPORTED, "options.mirostat"),
        (chat, {"options": {"stop": [1]}}, Reason.INVALID_FIELD, "options.stop[0]"),
        (chat, {"options": 1}, Reason.INVALID_FIELD, "options"),
        (chat, {"format": "yaml"}, Reason.INVALID_FIELD, "format"),
        (chat, {"think": "much"}, Reason.INVALID_FIELD, "think"),
        (chat, {"truncate": True}, Reason.FEATURE_UNSUPPORTED, "truncate"),
        (chat, {"temperature": 1}, Reason.FEATURE_UNSUPPORTED, "temperature"),
        (chat, {"system": "a"}, Reason.FEATURE_UNSUPPORTED, "system"),
        (chat, {"prompt": "a"}, Reason.FEATURE_UNSUPPORTED, "prompt"),
        (chat, {"raw": True}, Reason.FEATURE_UNSUPPORTED, "raw"),
        (generate, {"messages": [USER]}, Reason.FEATURE_UNSUPPORTED, "messages"),
        (generate, {"tools": [{}]}, Reason.FEATURE_UNSUPPORTED, "tools"),
        (chat, {"suffix": "a"}, Reason.FEATURE_UNSUPPORTED, "suffix"),
        (generate, {"suffix": "a", "system": "a"}, Reason.INVALID_FIELD, "system"),
        (generate, {"suffix": "a", "raw": True}, Reason.INVALID_FIELD, "suffix"),
        (generate, {"template": "a"}, Reason.FEATURE_UNSUPPORTED, "template"),
        (generate, {"context": [1]}, Reason.FEATURE_UNSUPPORTED, "context"),
        (generate, {"images": ["a"]}, Reason.FEATURE_UNSUPPORTED, "images"),
        (generate, {"raw": True, "system": "a"}, Reason.INVALID_FIELD, "system"),
        (embed, {"input": 1}, Reason.INVALID_FIELD, "input"),
        (embed, {"input": ["a", 1]}, Reason.INVALID_FIELD, "input[1]"),
        (embed, {"input": [5]}, Reason.INVALID_FIELD, "input[0]"),
        (embed, {"input": ["a"] * 2_049}, Reason.INVALID_FIELD, "input"),
        (embed, {"truncate": 1}, Reason.INVALID_FIELD, "truncate"),
        (embed, {"dimensions": "4"}, Reason.INVALID_FIELD, "dimensions"),
        (embed, {"options": 1}, Reason.INVALID_FIELD, "options"),
        (embed, {"prompt": "a"}, Reason.FEATURE_UNSUPPORTED, "prompt"),
        (embed, {"normalize": False}, Reason.FEATURE_UNSUPPORTED, "normalize"),
        (embed, {"encoding_format": "base64"}, Reason.FEATURE_UNSUPPORTED, "encoding_format"),
        (embed, {"images": ["a"]}, Reason.FEATURE_UNSUPPORTED, "images"),
        (embed_prompt, {"prompt": ["a"]}, Reason.INVALID_FIELD, "prompt"),
        (embed_prompt, {"input": "a"}, Reason.FEATURE_UNSUPPORTED, "input"),
        (embed_prompt, {"dimensions": 4}, Reason.FEATURE_UNSUPPORTED, "dimensions"),
    ],
)
def test_other_bodies_are_refused_by_the_field(read: Any, fields: Any, reason: Reason, field: str) -> None:
    with pytest.raises(QuireError) as error:
        read(**fields)
    assert (error.value.reason, error.value.field) == (reason, field)


def test_errors_about_the_whole_prompt_name_what_the_body_has() -> None:
    assert [read.prompt.field_path(Field.PROMPT) for read in (chat(), generate())] == ["messages", "prompt"]
