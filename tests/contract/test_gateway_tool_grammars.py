"""Grammars that stand behind choices of tools, strict tools, and constraints beside tools and reasoning."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from llguidance import LLTokenizer

from answers_with_calls import ANSWERS, make_family_directory
from gateway_harness import Harness, reason_of, running_gateway
from quire.inference.v1 import inference_pb2 as api
from scripted_scheduler import answer_with
from svc_common.grammars import compile_grammar, load_grammar_tokenizer
from tool_families import TOOL_FAMILIES, tool

EOS = 0
HERMES = TOOL_FAMILIES["hermes"].tokenizer
CITY: Any = tool("get_weather", city={"type": "string"})
NOW: Any = tool("now")
USER: Any = {"role": "user", "content": "Weather?"}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WRONG_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Paris"}}\n</tool_call>'
THINK = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_directory(tmp_path_factory.mktemp("models") / "hermes", "hermes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(hermes: Path) -> AsyncIterator[Harness]:
    """One gateway for all tests, since the process that checks grammars takes time to start."""
    async with running_gateway(hermes, 2_000, vocab_size=HERMES.get_vocab_size()) as harness:
        yield harness


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_grammar_tokenizer(HERMES.to_str(), [EOS])


def admits(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a text is a whole match of a grammar."""
    matcher = compile_grammar(tokenizer, grammar)
    token_ids = HERMES.encode(text, add_special_tokens=False).ids
    return matcher.consume_tokens(token_ids) and matcher.is_accepting()


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [CITY, NOW], "max_tokens": 200, **fields}


def strict(one: Any) -> Any:
    return {**one, "function": {**one["function"], "strict": True}}


async def grammar_of(gateway: Harness, **fields: Any) -> str:
    """The grammar that reaches the scheduler."""
    gateway.scheduler.script = answer_with(ANSWERS["two calls"].token_ids, stop_token_id=EOS)
    response = await gateway.http.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return str(gateway.scheduler.all("submit")[-1].sampling.grammar)


NAMED = {"type": "function", "function": {"name": "now"}}
RUN_CALL = '<tool_call>\n{"name": "run", "arguments": {"input": "print(\\"a\\")\\n"}}\n</tool_call>'
WRONG_RUN = '<tool_call>\n{"name": "run", "arguments": {"input": "exit(1)"}}\n</tool_call>'
GRAMMARS = {"lark": 'start: "print(" /[^)]*/ ")" LF?\n%import common.LF', "regex": r"print\([^)]*\)\n?"}


def run_tool(syntax: str | None = None, definition: str | None = None) -> Any:
    """A custom tool, with a grammar if a syntax is given."""
    grammar = {"syntax": syntax, "definition": GRAMMARS.get(syntax or "") if definition is None else definition}
    form = {"type": "text"} if syntax is None else {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "run", "format": form}}


def allowed(mode: str, *tools: Any) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "required": (
        {"tool_choice": "required"},
        [CALL, NOW_CALL, THINK + CALL, f"{CALL}\n{NOW_CALL}"],
        ["Hello.", WRONG_CALL, f"Hello. {CALL}", ""],
    ),
    "required, not parallel": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        [CALL],
        [f"{CALL}\n{NOW_CALL}"],
    ),
    "named": ({"tool_choice": NAMED}, [NOW_CALL], [CALL, f"{NOW_CALL}\n{NOW_CALL}", "Hello."]),
    "strict": (
        {"tools": [strict(CITY), NOW]},
        ["Hello.", CALL, f"Hello. {CALL}", NOW_CALL],
        [WRONG_CALL],
    ),
    "one of two is strict": ({"tools": [CITY, strict(NOW)]}, [WRONG_CALL, CALL, NOW_CALL], []),
    "format beside tools": (
        {"response_format": FORM},
        ['{"a": 1}', THINK + '{"a": 1}', CALL, WRONG_CALL],
        ["Hello.", "{}", 'Hello. {"a": 1}'],
    ),
    "format of a model that reasons": (
        {"response_format": FORM, "tools": []},
        ['{"a": 1}', THINK + '{"a": 1}'],
        [CALL],
    ),
    "limit of the reasoning": (
        {"thinking_token_budget": 5, "tools": []},
        ["Hello.", THINK + "Hello.", "<think></think>", ""],
        ["<think>\nWell, this is longer.\n</think>\n\nHello."],
    ),
    "limit of the reasoning beside tools": (
        {"thinking_token_budget": 0},
        ["Hello.", "<think></think>" + CALL, WRONG_CALL, f"Hello. {CALL}"],
        [THINK + CALL],
    ),
    "limit of the reasoning beside a format": (
        {"thinking_token_budget": 5, "tools": [], "response_format": FORM},
        ['{"a": 1}', THINK + '{"a": 1}'],
        ["Hello.", '<think>\nWell, this is longer.\n</think>\n\n{"a": 1}'],
    ),
    "allowed": (
        {"tool_choice": allowed("auto", NAMED)},
        ["Hello.", NOW_CALL, THINK + NOW_CALL, f"Hello. {NOW_CALL}\n{NOW_CALL}"],
        [CALL, f"{NOW_CALL}\n{CALL}"],
    ),
    "allowed and required": (
        {"tool_choice": allowed("required", NAMED), "tools": [CITY, NOW, strict(tool("other"))]},
        [NOW_CALL],
        ["Hello.", CALL, NOW_CALL.replace("now", "other")],
    ),
    "allowed beside a format": (
        {"tool_choice": allowed("auto", NAMED), "response_format": FORM},
        ['{"a": 1}', NOW_CALL],
        [CALL, "Hello."],
    ),
    "custom": ({"tools": [run_tool(), NOW], "tool_choice": "required"}, [RUN_CALL, WRONG_RUN, NOW_CALL], ["Hello."]),
    **{
        f"custom, {syntax}": ({"tools": [run_tool(syntax), CITY]}, ["Hello.", RUN_CALL, WRONG_CALL], [WRONG_RUN])
        for syntax in GRAMMARS
    },
    "custom and named": (
        {"tools": [run_tool("lark"), CITY], "tool_choice": {"type": "custom", "custom": {"name": "run"}}},
        [RUN_CALL],
        [WRONG_RUN, CALL, f"{RUN_CALL}\n{RUN_CALL}"],
    ),
    "legacy": (
        {"tools": None, "functions": [CITY["function"], NOW["function"]], "function_call": {"name": "now"}},
        [NOW_CALL],
        [CALL],
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "admitted", "refused"), CASES.values(), ids=CASES)
async def test_the_grammar_admits_what_was_asked_for(
    fields: dict[str, Any], admitted: list[str], refused: list[str], gateway: Harness, tokenizer: LLTokenizer
) -> None:
    grammar = await grammar_of(gateway, **fields)
    assert [text for text in admitted if not admits(tokenizer, grammar, text)] == []
    assert [text for text in refused if admits(tokenizer, grammar, text)] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("syntax", "definition", "message"),
    [
        ("lark", "start: a", "the grammar of run cannot be applied: at 1(8): unknown name"),
        ("regex", "", "the grammar of run cannot be applied: must not be empty"),
        ("regex", "a(", "the grammar of run cannot be applied: invalid regular expression"),
        ("regex", "(?=a)b", "the grammar of run cannot be applied: invalid regular expression: look-around"),
        ("lark", 'start: "a" start?', "the grammar of run: rules that contain themselves are not supported"),
        ("lark", 'start: "a"\n%ignore " "', "the grammar of run: %ignore is not supported"),
    ],
)
async def test_a_grammar_that_cannot_be_applied_is_named(
    syntax: str, definition: str, message: str, gateway: Harness
) -> None:
    for choice in ("auto", "required"):
        fields = body(tools=[NOW, run_tool(syntax, definition)], tool_choice=choice)
        response = await gateway.http.post("/v1/chat/completions", json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "grammar_invalid", "tools")
        assert message in error["message"]
    custom: Any = {"grammar" if syntax == "lark" else syntax: definition}
    chat = api.Chat(messages=[USER], tools=[{"name": "now"}, {"name": "run", "custom": custom}])
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await gateway.stub.Generate(api.GenerateRequest(generation=api.Generation(chat=chat)))
    assert reason_of(refusal.value) == ("GRAMMAR_INVALID", "generation.chat.tools")
    assert message in (refusal.value.details() or "")


@pytest.mark.asyncio(loop_scope="module")
async def test_auto_without_strict_tools_has_no_grammar(gateway: Harness) -> None:
    assert await grammar_of(gateway) == ""
    assert await grammar_of(gateway, tools=[run_tool()]) == ""
    assert await grammar_of(gateway, tool_choice="none") == ""
    assert await grammar_of(gateway, thinking_token_budget=-1) == ""


RUN_CUSTOM = {syntax: run_tool(syntax) for syntax in (None, *GRAMMARS)}
# Fields over HTTP, and those of Chat that stand for them.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "required": ({"tool_choice": "required"}, {"tool_mode": api.TOOL_MODE_REQUIRED}),
    "allowed": ({"tool_choice": allowed("auto", NAMED)}, {"allowed_tools": {"names": ["now"]}}),
    "allowed and required": (
        {"tool_choice": allowed("required", NAMED)},
        {"allowed_tools": {"mode": api.TOOL_MODE_REQUIRED, "names": ["now"]}},
    ),
    "custom": (
        {"tools": [RUN_CUSTOM[None]], "tool_choice": "required"},
        {"tools": [{"name": "run", "custom": {}}], "tool_mode": api.TOOL_MODE_REQUIRED},
    ),
    "custom, lark": (
        {"tools": [RUN_CUSTOM["lark"]]},
        {"tools": [{"name": "run", "custom": {"grammar": GRAMMARS["lark"]}}]},
    ),
    "custom, regex": (
        {"tools": [RUN_CUSTOM["regex"]]},
        {"tools": [{"name": "run", "custom": {"regex": GRAMMARS["regex"]}}]},
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "chat_fields"), SAME.values(), ids=SAME)
async def test_both_protocols_have_the_same_grammar(
    fields: dict[str, Any], chat_fields: dict[str, Any], gateway: Harness
) -> None:
    over_http = await grammar_of(gateway, **fields)
    assert over_http
    tools = [
        api.Tool(
            name=each["function"]["name"],
            description=each["function"]["description"],
            parameters=json.dumps(each["function"]["parameters"]),
        )
        for each in (CITY, NOW)
    ]
    chat: dict[str, Any] = {"messages": [USER], "tools": tools} | chat_fields
    generation = api.Generation(chat=api.Chat(**chat), stopping=api.Stopping(max_tokens=200))
    await gateway.stub.Generate(api.GenerateRequest(generation=generation))
    first, second = gateway.scheduler.all("submit")[-2:]
    assert second.sampling.grammar == over_http
    assert second.prompt_token_ids == first.prompt_token_ids
    assert first.body_digest == second.body_digest


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("constraint", "choice"),
    [({"response_format": FORM}, "required"), ({"response_format": FORM}, NAMED), ({"guided_regex": "a"}, "required")],
    ids=["schema, required", "schema, named", "regex, required"],
)
async def test_a_constraint_on_the_text_has_no_effect_where_a_tool_must_be_called(
    constraint: dict[str, Any], choice: Any, gateway: Harness
) -> None:
    without = await grammar_of(gateway, tool_choice=choice)
    assert without
    assert await grammar_of(gateway, tool_choice=choice, **constraint) == without


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("constraint", "field"),
    [({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"), ({"guided_regex": "a"}, "guided_regex")],
    ids=["structured_outputs", "guided"],
)
async def test_a_constraint_of_vllm_is_refused_beside_a_named_tool(
    constraint: dict[str, Any], field: str, gateway: Harness
) -> None:
    response = await gateway.http.post("/v1/chat/completions", json=body(tool_choice=NAMED, **constraint))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.asyncio(loop_scope="module")
async def test_a_named_tool_is_no_reason_of_its_own_to_finish(gateway: Harness) -> None:
    gateway.scheduler.script = answer_with(HERMES.encode(NOW_CALL).ids, stop_token_id=EOS)
    (choice,) = (await gateway.http.post("/v1/chat/completions", json=body(tool_choice=NAMED))).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


BAD = {"type": "object", "properties": {"a": {"not": {}}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required", "min_tokens": 1}, "feature_unsupported", "min_tokens"),
    ({"tool_choice": "required", "ignore_eos": True}, "feature_unsupported", "ignore_eos"),
    ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "feature_unsupported", "use_beam_search"),
    ({"tools": [strict(CITY)], "ignore_eos": True}, "feature_unsupported", "ignore_eos"),
    ({"thinking_token_budget": 3, "min_tokens": 1}, "feature_unsupported", "min_tokens"),
    ({"thinking_token_budget": 3, "use_beam_search": True, "n": 2}, "feature_unsupported", "use_beam_search"),
    ({"thinking_token_budget": 3, "bad_words": ["a"]}, "feature_unsupported", "bad_words"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": BAD, "strict": True}}]},
        "grammar_invalid",
        "tools",
    ),
    ({"guided_regex": "("}, "grammar_invalid", "guided_regex"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "code", "field"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], code: str, field: str, gateway: Harness
) -> None:
    error = (await gateway.http.post("/v1/chat/completions", json=body(**fields))).json()["error"]
    assert (error["code"], error["param"]) == (code, field), error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_error_of_a_schema_names_the_tool(gateway: Harness) -> None:
    tools = [api.Tool(name="a"), api.Tool(name="b", parameters=json.dumps(BAD), strict=True)]
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="a")], tools=tools)
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"the parameters of b cannot be applied: at #/properties/a/not: .* not supported"
    ) as error:
        await gateway.stub.Generate(api.GenerateRequest(generation=api.Generation(chat=chat)))
    assert reason_of(error.value) == ("GRAMMAR_INVALID", "generation.chat.tools")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_an_answer_that_must_call_has_no_text_where_it_was_cut(choice: Any, gateway: Harness) -> None:
    written = HERMES.encode(NOW_CALL, add_special_tokens=False).ids
    gateway.scheduler.script = answer_with(written[: len(HERMES.encode('<tool_call>\n{"name": "no').ids)])
    fields = body(tool_choice=choice)
    (whole,) = (await gateway.http.post("/v1/chat/completions", json=fields)).json()["choices"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("length", "")
    assert "tool_calls" not in whole["message"]
    streamed = (await gateway.http.post("/v1/chat/completions", json=fields | {"stream": True})).text
    rows = [json.loads(row.removeprefix("data: ")) for row in streamed.splitlines() if row.startswith("data: {")]
    assert rows[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(row["choices"][0]["delta"].get("content") for row in rows)
    unchosen = (await gateway.http.post("/v1/chat/completions", json=body())).json()["choices"]
    assert unchosen[0]["message"]["content"]
