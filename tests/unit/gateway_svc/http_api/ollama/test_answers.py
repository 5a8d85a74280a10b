"""Answers in Ollama's format."""

import json
import time
from array import array
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from answers_with_calls import ANSWERS, format_of
from gateway_svc.chat_template import TemplateChat
from gateway_svc.http_api.calls import InputValues
from gateway_svc.http_api.errors import HttpError
from gateway_svc.http_api.ollama.answers import OllamaBuilder, OllamaForm, embed_answer
from gateway_svc.http_api.ollama.errors import OLLAMA_ERRORS
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, ToolCallDelta, Usage
from gateway_svc.resume_position import ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.turn_format import TurnFormat
from gateway_values import id_of, make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from svc_common.errors import QuireError, Reason
from tiny_model import tiny_tokenizer
from tool_families import CALLING_FAMILIES, tool

VOCABULARY = vocabulary_of(tiny_tokenizer())
RENDERING = make_rendering(VOCABULARY)
USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=2)
CALLS = [
    {"id": "call_a", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}},
    {"id": "call_b", "function": {"index": 1, "name": "g", "arguments": {}}},
]
CHUNKS = [
    Chunk(0, 0, reasoning="Hm"),
    Chunk(0, 1, "I ", reasoning="."),
    Chunk(0, 2, tool_calls=[ToolCallDelta(0, "", "call_a", "f")]),
    Chunk(0, 3, tool_calls=[ToolCallDelta(0, '{"a": 1')]),
    Chunk(0, 4, tool_calls=[ToolCallDelta(0, "}"), ToolCallDelta(1, "", "call_b", "g")], ended_calls=(0,)),
    Chunk(0, 5, tool_calls=[ToolCallDelta(1, "{}")]),
    Chunk(0, 6, finish=Finish(FinishReason.TOOL_CALLS, 2), ended_calls=(1,)),
]


def builder(form: OllamaForm) -> OllamaBuilder:
    return OllamaBuilder(form, RENDERING, VOCABULARY, lambda: USAGE, time.monotonic() - 2)


def lines(form: OllamaForm, *chunks: Chunk) -> list[Any]:
    stream = builder(form)
    text = b"".join([*(stream.lines(chunk) for chunk in chunks), stream.last_lines()]).decode()
    return [json.loads(line) for line in text.splitlines()]


def check_end(line: Any, reason: str) -> None:
    assert (line["done"], line["done_reason"], line["load_duration"]) == (True, reason, 0)
    assert (line["prompt_eval_count"], line["eval_count"]) == (9, 4)
    assert 2e9 <= line["total_duration"] <= 200e9
    assert line["prompt_eval_duration"] + line["eval_duration"] == pytest.approx(line["total_duration"], abs=2)


def test_a_streamed_chat() -> None:
    *parts, end = lines(OllamaForm.CHAT, *CHUNKS)
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": "", "thinking": "Hm"},
        {"role": "assistant", "content": "I ", "thinking": "."},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "assistant", "content": "", "tool_calls": CALLS[1:]},
    ]
    for part in (*parts, end):
        assert part["model"] == RENDERING.model
        assert part["created_at"].endswith("Z")
        datetime.fromisoformat(part["created_at"])
    assert not any(part["done"] for part in parts)
    assert end["message"] == {"role": "assistant", "content": ""}
    check_end(end, "stop")


@pytest.mark.parametrize("name", ["two calls", "tags", "hidden markers", "deepseek", "deepseek v3.1"])
def test_a_call_is_sent_when_it_ends_before_what_follows(name: str) -> None:
    answer = ANSWERS[name]
    family = CALLING_FAMILIES[answer.family]
    after = family.tokenizer.encode("\nIt is sunny.", add_special_tokens=False).ids
    weather = tool("get_weather", city={"type": "string"}, days={"type": "integer"})
    turn = TurnFormat.of_prompt(format_of(answer.family), TemplateChat([], callable_tools=[weather]), "")
    vocabulary = vocabulary_of(family.tokenizer)
    sequence = SequenceOutput(0, vocabulary, replace(make_rendering(vocabulary), turn=turn), ResumePosition())
    stream, found = builder(OllamaForm.CHAT), []
    for place, token_id in enumerate([*answer.token_ids, *after]):
        sequence.extend(scheduler_v1.Tokens(offset=place, token_ids=[token_id]))
        lines = b"".join([stream.lines(chunk) for chunk in sequence.pop_pending()])
        found += [(place, json.loads(line)["message"]) for line in lines.splitlines()]
    of_calls = [place for place, message in found if "tool_calls" in message]
    assert len(of_calls) == len(answer.calls)
    assert of_calls[-1] < len(answer.token_ids)
    assert "".join([message["content"] for place, message in found if place > of_calls[-1]]).strip() == "It is sunny."


def test_a_whole_chat() -> None:
    answer = builder(OllamaForm.CHAT).whole(CHUNKS)
    assert answer["message"] == {"role": "assistant", "content": "I ", "thinking": "Hm.", "tool_calls": CALLS}
    check_end(answer, "stop")


def test_log_probabilities_are_those_of_chats() -> None:
    a, b = (id_of(tiny_tokenizer(), text) for text in "ab")
    chunks = [
        Chunk(0, 0, "a", logprobs=[TokenLogprob(a, -0.5, ((a, -0.5), (b, -1.0)), 0)]),
        Chunk(0, 1, logprobs=[TokenLogprob(b, float("-inf"), (), 1)]),  # its text is not due
    ]
    of_a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    of_b = {"token": "b", "logprob": -1.0, "bytes": [98]}
    expected = [of_a | {"top_logprobs": [of_a, of_b]}, of_b | {"logprob": -9999.0}]
    for form in OllamaForm:
        *parts, end = lines(form, *chunks)
        assert [part["logprobs"] for part in parts] == [expected[:1], expected[1:]]
        assert "logprobs" not in end
        assert builder(form).whole(chunks)["logprobs"] == expected


def test_durations_end_with_the_output_and_not_when_the_answer_is_made() -> None:
    late = builder(OllamaForm.CHAT)
    late.begin()
    time.sleep(0.01)
    late.end()
    time.sleep(0.2)  # until a thread is free
    answer = late.whole(CHUNKS)
    assert 10e6 <= answer["eval_duration"] < 150e6
    assert answer["total_duration"] == pytest.approx(answer["prompt_eval_duration"] + answer["eval_duration"], abs=2)


def test_a_generation() -> None:
    chunks = [Chunk(0, 0, "a", reasoning="so"), Chunk(0, 1, "b", finish=Finish(FinishReason.LENGTH))]
    first, second, end = lines(OllamaForm.GENERATE, *chunks)
    assert (first["response"], first["thinking"], second["response"]) == ("a", "so", "b")
    assert end["response"] == ""
    check_end(end, "length")
    whole = builder(OllamaForm.GENERATE).whole(chunks)
    assert (whole["response"], whole["thinking"]) == ("ab", "so")
    check_end(whole, "length")


def test_a_model_that_is_loaded() -> None:
    answer = OllamaForm.CHAT.loaded("m")
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("m", True, "load")
    assert OllamaForm.GENERATE.loaded("m")["response"] == ""


def test_vectors() -> None:
    vectors = [array("f", (0.5, -1)), array("f", (0.25, 2))]
    answer = embed_answer(InputValues(vectors, "m", USAGE), 2.5)
    assert (answer["model"], answer["embeddings"]) == ("m", [[0.5, -1.0], [0.25, 2.0]])
    assert (answer["prompt_eval_count"], answer["load_duration"]) == (9, 0)
    assert answer["total_duration"] == 2_500_000_000


def test_errors() -> None:
    error = HttpError.of(QuireError(Reason.INVALID_FIELD, "is bad", field="options.top_p"))
    assert OLLAMA_ERRORS.body(error) == {"error": "options.top_p: is bad"}
    assert OLLAMA_ERRORS.event(error) == b'{"error":"options.top_p: is bad"}\n'
