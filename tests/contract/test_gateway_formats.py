"""Answers of each family over HTTP, as clients of three protocols read them; the next turn of the chat is rendered."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from answers_with_calls import ANSWERS, CUSTOM_TOOL, Answer, make_family_directory
from gateway_harness import Harness, running_gateway
from scripted_scheduler import answer_with
from svc_common.grammars import compile_grammar, load_grammar_tokenizer
from tool_families import CALLING_FAMILIES, tool

EOS = 0
FAMILY = CALLING_FAMILIES["gpt-oss"]
TOOLS: list[Any] = [tool("get_weather", city={"type": "string"}, days={})]
USER: Any = {"role": "user", "content": "Weather?"}
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": []}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}

answers = pytest.mark.parametrize(
    "answer",
    [one for one in ANSWERS.values() if all(name != CUSTOM_TOOL for name, _ in one.calls)],
    ids=[title for title, one in ANSWERS.items() if all(name != CUSTOM_TOOL for name, _ in one.calls)],
)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@answers
async def test_a_chat_goes_on_after_calls(answer: Answer, tmp_path: Path) -> None:
    async with running_gateway(make_family_directory(tmp_path / "model", answer.family), 4_000) as quire:
        quire.scheduler.script = answer_with(answer.token_ids, stop_token_id=EOS)
        body: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 400}
        choice = (await quire.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        message = choice["message"]
        assert (message["content"] or "", message["reasoning"] or "") == (answer.text, answer.reasoning)
        assert calls_of(message) == [(name, json.loads(arguments)) for name, arguments in answer.calls]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        body["messages"] = [USER, message, *results, {"role": "user", "content": "Why?"}]
        response = await quire.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        prompt = CALLING_FAMILIES[answer.family].tokenizer.decode(
            list(quire.scheduler.all("submit")[-1].prompt_token_ids), skip_special_tokens=False
        )
        _, _, turn = prompt.partition("Weather?")
        for name, _ in answer.calls:
            assert name in turn
        assert all(result["content"] in turn for result in results)


async def test_headers_are_no_text_where_reasoning_is_text(tmp_path: Path) -> None:
    answer = ANSWERS["harmony, an answer"]
    directory = make_family_directory(tmp_path / "model", answer.family)
    async with running_gateway(directory, 4_000, reasoning_format="none") as quire:
        quire.scheduler.script = answer_with(answer.token_ids, stop_token_id=EOS)
        body = {"messages": [USER], "max_tokens": 400}
        message = (await quire.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (f"{answer.reasoning}\n{answer.text}", None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quire(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway for a model with harmony, one for all tests, since the process that checks grammars takes time."""
    directory = make_family_directory(tmp_path_factory.mktemp("models") / "gpt-oss", "gpt-oss")
    async with running_gateway(directory, 4_000, vocab_size=FAMILY.tokenizer.get_vocab_size()) as harness:
        yield harness


HARMONY = ANSWERS["harmony"]


@pytest.mark.asyncio(loop_scope="module")
async def test_harmony_over_anthropics_api(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HARMONY.token_ids, stop_token_id=EOS)
    schema = TOOLS[0]["function"]["parameters"]
    body = {"messages": [USER], "tools": [{"name": "get_weather", "input_schema": schema}], "max_tokens": 400}
    answer = (await quire.http.post("/v1/messages", json=body)).json()
    thinking, text, *calls = answer["content"]
    assert (thinking["thinking"], text["text"]) == (HARMONY.reasoning, HARMONY.text)
    assert [call["input"] for call in calls] == [json.loads(arguments) for _, arguments in HARMONY.calls]
    assert answer["stop_reason"] == "tool_use"
    streamed = (await quire.http.post("/v1/messages", json={**body, "stream": True})).text
    data = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data")]
    deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == HARMONY.text
    assert "".join(delta.get("thinking", "") for delta in deltas) == HARMONY.reasoning
    assert "".join(delta.get("partial_json", "") for delta in deltas) == 2 * HARMONY.calls[0][1]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "4 degrees"} for call in calls]
    messages = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    assert (await quire.http.post("/v1/messages", json={**body, "messages": messages})).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_harmony_over_the_responses_api(quire: Harness) -> None:
    quire.scheduler.script = answer_with(HARMONY.token_ids, stop_token_id=EOS)
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"input": "Weather?", "tools": tools, "max_output_tokens": 400, "reasoning": {"effort": "high"}}
    output = (await quire.http.post("/v1/responses", json=body)).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == HARMONY.reasoning
    assert output[1]["content"][0]["text"] == HARMONY.text
    assert [item["arguments"] for item in output[2:]] == [arguments for _, arguments in HARMONY.calls]
    prompt = quire.scheduler.all("submit")[-1].prompt_token_ids
    assert "Reasoning: high" in FAMILY.tokenizer.decode(list(prompt))
    streamed = (await quire.http.post("/v1/responses", json={**body, "stream": True})).text
    data = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(each["delta"] for each in data if each["type"] == "response.output_text.delta") == HARMONY.text
    ends = [each["arguments"] for each in data if each["type"] == "response.function_call_arguments.done"]
    assert ends == [arguments for _, arguments in HARMONY.calls]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "4 degrees"} for item in output[2:]
    ]
    given = [{"role": "user", "content": "Weather?"}, *output, *results]
    assert (await quire.http.post("/v1/responses", json={**body, "input": given})).status_code == 200


GRAMMARS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "required": (
        {"tool_choice": "required"},
        [CALL, ANALYSIS + CALL],
        ["Hello.", f"{FINAL}Hello.", CALL.replace("get_weather", "other"), CALL.replace('"Rome"', "1")],
    ),
    "strict": (
        {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]},
        [
            f"{FINAL}Hello.",
            f"{ANALYSIS}{FINAL}Hello.<|end|>",
            CALL,
            f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
            " that the prompt begins",
        ],
        [CALL.replace('"Rome"', "1"), ANALYSIS + CALL.replace('"Rome"', "1")],
    ),
    "format": (
        {"response_format": FORM},
        [f'{FINAL}{{"a": 1}}', f'{ANALYSIS}{FINAL}{{"a": 1}}', CALL],
        [f"{FINAL}Hello.", f"{ANALYSIS}{FINAL}{{}}"],
    ),
    "format without tools": (
        {"response_format": FORM, "tools": []},
        [f'{FINAL}{{"a": 1}}', f'{ANALYSIS}{FINAL}{{"a": 1}}<|end|>'],
        [CALL, f"{FINAL}Hello."],
    ),
    "limit of the reasoning": (
        {"thinking_token_budget": 3, "tools": []},
        [f"{FINAL}Hello.", f"{ANALYSIS}{FINAL}Hello."],
        [f"{ANALYSIS.replace('Hm.', 'Well, this is longer.')}{FINAL}Hello."],
    ),
}


@pytest.mark.parametrize("case", GRAMMARS)
@pytest.mark.asyncio(loop_scope="module")
async def test_harmony_under_a_grammar(quire: Harness, case: str) -> None:
    fields, admitted, refused = GRAMMARS[case]
    quire.scheduler.script = answer_with(HARMONY.token_ids, stop_token_id=EOS)
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 400, **fields}
    response = await quire.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    grammar = quire.scheduler.all("submit")[-1].sampling.grammar
    # Two tokens end a turn, as in the model's generation_config.json.
    ids = FAMILY.tokenizer.get_vocab()
    ends = [ids["<|return|>"], ids["<|call|>"]]
    tokenizer = load_grammar_tokenizer(FAMILY.tokenizer.to_str(), ends)
    for text in (*admitted, *refused):
        tokens = FAMILY.tokenizer.encode(text, add_special_tokens=False).ids
        for end in ends:
            matcher = compile_grammar(tokenizer, grammar)
            is_admitted = matcher.consume_tokens(tokens) and matcher.is_accepting() and matcher.consume_token(end)
            assert is_admitted == (text in admitted), text
