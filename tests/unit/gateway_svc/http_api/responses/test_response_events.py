"""Events of a response are a function of the output's tokens, and build the response."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from answers_with_calls import ANSWERS, CUSTOM_TOOL, Answer, format_of
from gateway_svc.chat_template import TemplateChat
from gateway_svc.http_api.responses.answer_models import ResponseAnswer, ResponseEvent
from gateway_svc.http_api.responses.events import ResponseEvents
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.output import Chunk, TokenLogprob, Usage
from gateway_svc.request_errors import cancelled, internal
from gateway_svc.resume_position import ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.turn_format import TurnFormat
from gateway_svc.vocabulary import Vocabulary
from gateway_values import make_rendering, vocabulary_of
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scripted_scheduler import length_end, stop_end
from svc_common.errors import QuireError
from tool_families import CALLING_FAMILIES, tool

Json = dict[str, Any]

EOS = 0
TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool(CUSTOM_TOOL, input={"type": "string"}),
]
HEAD = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "background": False,
    "model": "m",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
VOCABULARIES: dict[str, Vocabulary] = {
    family: vocabulary_of(CALLING_FAMILIES[family].tokenizer) for family in {one.family for one in ANSWERS.values()}
}
answers = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


def sequence_of(answer: Answer, **options: Any) -> SequenceOutput:
    vocabulary = VOCABULARIES[answer.family]
    chat = TemplateChat([], callable_tools=TOOLS, custom_tools=frozenset({CUSTOM_TOOL}))
    turn = TurnFormat.of_prompt(format_of(answer.family), chat, "")
    rendering = replace(make_rendering(vocabulary, **options), turn=turn)
    return SequenceOutput(0, vocabulary, rendering, ResumePosition(), chunk_per_token=True)


def played(
    answer: Answer,
    sizes: list[int],
    *,
    hides_reasoning: bool = False,
    end: scheduler_v1.SequenceEnd | None = None,
    num_tokens: int | None = None,
    failure: QuireError | None = None,
    **head: Any,
) -> tuple[list[Json], Json]:
    """All events of an answer whose tokens arrive in steps of these sizes, and the response after them."""
    stored = StoredResponse({**HEAD, **head}, hides_reasoning=hides_reasoning)
    events = ResponseEvents(stored, VOCABULARIES[answer.family])
    sequence = sequence_of(answer)
    token_ids = [*answer.token_ids, EOS][:num_tokens]
    found, offset = events.begin(), 0
    for size in [*sizes, len(token_ids)]:
        piece = token_ids[offset : offset + size]
        if not piece:
            break
        offset += len(piece)
        is_last = offset == len(token_ids) and failure is None
        ending = (end or stop_end(EOS)) if is_last else None
        sequence.extend(scheduler_v1.Tokens(offset=offset - len(piece), token_ids=piece, end=ending))
        for chunk in sequence.pop_pending():
            found += events.add(chunk, Usage(5, sequence.num_tokens, 2, sequence.num_reasoning_tokens))
    if failure is not None:
        found += events.fail(failure, Usage(5, sequence.num_tokens, 2, sequence.num_reasoning_tokens))
    return found, events.response


def rebuilt(events: list[Json]) -> list[Json]:
    """The output items that a client makes of the events."""
    items: list[Json] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append({**event["item"], "content": []} if "content" in event["item"] else {**event["item"]})
            case "content_part.added":
                items[-1]["content"] = [{**event["part"]}]
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[-1]["input"] += event["delta"]
            case "custom_tool_call_input.done":
                assert items[-1]["input"] == event["input"]
            case "output_text.done" | "reasoning_text.done":
                assert items[-1]["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert items[-1]["content"] == [event["part"]]
            case "function_call_arguments.done":
                assert (items[-1]["arguments"], items[-1]["name"]) == (event["arguments"], event["name"])
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


@answers
def test_events_build_the_response(answer: Answer) -> None:
    events, response = played(answer, [])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert rebuilt(events) == response["output"]
    last = events[-1]
    assert (last["type"], last["response"], response["status"]) == ("response.completed", response, "completed")
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    assert "".join(texts) == answer.text
    reasoning = [item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning"]
    assert "".join(reasoning) == answer.reasoning
    fields = {"function_call": "arguments", "custom_tool_call": "input"}
    calls = [item for item in response["output"] if item["type"] in fields]
    assert [(call["name"], call[fields[call["type"]]]) for call in calls] == list(answer.calls)
    assert all((call["type"] == "custom_tool_call") is (call["name"] == CUSTOM_TOOL) for call in calls)
    assert len({item["id"] for item in response["output"]}) == len(response["output"])
    assert (response["usage"]["output_tokens"], response["usage"]["total_tokens"]) == (
        len(answer.token_ids) + 1,
        len(answer.token_ids) + 6,
    )
    assert (response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == bool(answer.reasoning)
    Response.model_validate(response)


@answers
def test_reasoning_may_be_left_out_and_counts(answer: Answer) -> None:
    events, response = played(answer, [], hides_reasoning=True)
    _, shown = played(answer, [])

    def outputs(items: list[Json]) -> list[Json]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert rebuilt(events) == response["output"]
    others = [item for item in shown["output"] if item["type"] != "reasoning"]
    if others:
        assert outputs(response["output"]) == outputs(others)
    else:
        assert [item["type"] for item in response["output"]] == ["message"]
    assert response["usage"] == shown["usage"]


def test_what_would_show_reasoning_is_left_out_with_it() -> None:
    answer = ANSWERS["reasoning, text and call"]
    vocabulary = VOCABULARIES[answer.family]
    chunks = [
        Chunk(0, 0, reasoning="Hm.", logprobs=[TokenLogprob(answer.token_ids[0], -0.5, (), 0)]),
        Chunk(0, 1, text="Hi", logprobs=[TokenLogprob(answer.token_ids[1], -0.5, (), 0)], text_tokens=(1,)),
    ]
    for hides_reasoning, num_logprobs in ((False, 1), (True, 0)):
        stored = StoredResponse(HEAD, has_logprobs=True, hides_reasoning=hides_reasoning)
        events = ResponseEvents(stored, vocabulary)
        deltas = [event for chunk in chunks for event in events.add(chunk, Usage(1, 1)) if "delta" in event]
        assert len(deltas[-1]["logprobs"]) == num_logprobs


@pytest.mark.parametrize("stop", [[], ["never there", "</thi", "\n\n\n"]], ids=["", "with stop strings"])
@answers
def test_log_probabilities_are_those_of_the_tokens_of_the_text(answer: Answer, stop: list[str]) -> None:
    """A marker, and white space around it, is not of the text; nor is the token that ends it."""
    vocabulary = VOCABULARIES[answer.family]
    sequence = sequence_of(answer, stop=stop, logprobs=0)
    token_ids = [*answer.token_ids, EOS]
    logprobs = [worker_v1.TokenLogprobs(logprob=-0.5)] * len(token_ids)
    sequence.extend(scheduler_v1.Tokens(token_ids=token_ids, logprobs=logprobs, end=stop_end(EOS)))
    events = ResponseEvents(StoredResponse(HEAD, has_logprobs=True), vocabulary)
    found = [event for chunk in sequence.pop_pending() for event in events.add(chunk, Usage(1, 1))]
    parts = [item["content"][0] for item in events.response["output"] if item["type"] == "message"]
    for part in parts:
        assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == [one for part in parts for one in part["logprobs"]]


@answers
def test_events_have_the_schema_of_the_documents(answer: Answer) -> None:
    head: dict[str, Any] = {
        **dict.fromkeys(ResponseAnswer.model_fields.keys() - {"output", "status", "usage"}),
        "metadata": {},
        "reasoning": {},
        "text": {},
        "store": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "service_tier": "default",
        "truncation": "disabled",
        "top_logprobs": 0,
        **HEAD,
    }
    events, response = played(answer, [], **head)
    ResponseAnswer.model_validate(response)
    for event in events:
        ResponseEvent.model_validate(event)


@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_events_are_the_same_however_tokens_arrive(data: st.DataObject) -> None:
    answer = data.draw(st.sampled_from(list(ANSWERS.values())))
    sizes = data.draw(st.lists(st.integers(1, 6), max_size=50))
    assert played(answer, sizes) == played(answer, [])


@answers
def test_a_prefix_of_the_tokens_makes_a_prefix_of_the_events(answer: Answer) -> None:
    whole, _ = played(answer, [])
    for num_tokens in range(1, len(answer.token_ids), 3):
        events, response = played(answer, [], num_tokens=num_tokens, failure=cancelled())
        assert events[:-1] == whole[: len(events) - 1]
        assert (events[-1]["type"], response["status"], response["error"]) == ("response.failed", "cancelled", None)
        statuses = [item["status"] for item in response["output"]]
        assert statuses[:-1] == ["completed"] * len(statuses[:-1])


@answers
def test_an_answer_that_reaches_its_length_has_a_cut_item(answer: Answer) -> None:
    events, response = played(answer, [], num_tokens=len(answer.token_ids) - 1, end=length_end())
    assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]][-1] == "incomplete"
    assert rebuilt(events) == response["output"]


def test_a_response_without_output_has_an_empty_message() -> None:
    events, response = played(ANSWERS["reasoning, text and call"], [1], num_tokens=0)
    assert (len(events), response["output"]) == (2, [])
    vocabulary = VOCABULARIES["hermes"]
    made = ResponseEvents(StoredResponse(HEAD), vocabulary)
    sequence = sequence_of(ANSWERS["reasoning, text and call"])
    sequence.extend(scheduler_v1.Tokens(token_ids=[EOS], end=stop_end(EOS)))
    for chunk in sequence.pop_pending():
        made.add(chunk, Usage(1, 1))
    [message] = made.response["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


def test_a_background_response_is_queued_first() -> None:
    answer = ANSWERS["reasoning, text and call"]
    assert ResponseEvents(StoredResponse({**HEAD, "background": True}), VOCABULARIES["hermes"]).response["status"] == (
        "queued"
    )
    events, _ = played(answer, [], background=True)
    assert [(event["type"], event["response"]["status"]) for event in events[:3]] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


def test_a_failure_has_the_code_and_the_message() -> None:
    error = internal("why")
    _, response = played(ANSWERS["reasoning, text and call"], [], num_tokens=3, failure=error)
    assert response["error"] == {"code": "server_error", "message": str(error)}
    assert response["status"] == "failed"
