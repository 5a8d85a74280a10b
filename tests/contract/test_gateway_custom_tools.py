"""Custom tools, which take a text, in chats and responses: with OpenAI's and Quire's clients and a scripted
scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import ResponseCustomToolCall

from answers_with_calls import make_family_directory
from gateway_harness import MODEL, Harness, running_gateway
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire_client import AllowedTools, AsyncClient, Client, CustomTool, FinishReason, Message, Tool
from responses_api import events_of
from scripted_scheduler import ScriptedSession, answer_with, stop_end
from tool_families import TOOL_FAMILIES, tool

EOS = 0
PROGRAM = 'print("é\\\\")\n'
USER: Any = {"role": "user", "content": "Run it."}
RUN: Any = {"type": "custom", "custom": {"name": "run", "description": "Runs a program."}}
OTHER: Any = tool("get_weather", city={"type": "string"})
RUN_ITEM: Any = {"type": "custom", "name": "run", "description": "Runs a program."}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def written(family: str) -> list[int]:
    """The tokens of an answer with a call of the tool, as a model of the family writes it."""
    call = json.dumps({"name": "run", "arguments": {"input": PROGRAM}}, ensure_ascii=False)
    text = {
        "hermes": f"I do. <tool_call>\n{call}\n</tool_call>",
        "qwen3-coder": (
            f"I do. <tool_call>\n<function=run>\n<parameter=input>\n{PROGRAM}\n</parameter>\n</function>\n</tool_call>"
        ),
    }[family]
    return TOOL_FAMILIES[family].tokenizer.encode(text, add_special_tokens=False).ids


def one_by_one(token_ids: list[int]) -> Any:
    """A script that sends tokens in messages of their own."""

    def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
        session.accept(submit.key)
        for offset, token_id in enumerate([*token_ids, EOS]):
            session.tokens(submit.key, [token_id], offset, end=stop_end(EOS) if offset == len(token_ids) else None)

    return script


@pytest.fixture(scope="module", params=["hermes", "qwen3-coder"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quire(family: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway for a model of the family."""
    directory = make_family_directory(tmp_path_factory.mktemp("models") / family, family)
    async with running_gateway(directory, 2_000, vocab_size=TOOL_FAMILIES[family].tokenizer.get_vocab_size()) as one:
        yield one


def prompt_of(quire: Harness, family: str) -> str:
    """The latest prompt, with control tokens."""
    token_ids = list(quire.scheduler.all("submit")[-1].prompt_token_ids)
    return TOOL_FAMILIES[family].tokenizer.decode(token_ids, skip_special_tokens=False)


async def test_a_call_of_a_chat_has_its_text(quire: Harness, client: openai.AsyncOpenAI, family: str) -> None:
    quire.scheduler.script = answer_with(written(family), stop_token_id=EOS)
    answer = await client.chat.completions.create(model=MODEL, messages=[USER], tools=[RUN, OTHER], max_tokens=200)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I do.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("run", PROGRAM)
    assert "Runs a program." in prompt_of(quire, family)

    # The call and its result go back to the model.
    quire.scheduler.script = answer_with([EOS], stop_token_id=EOS)
    messages: list[Any] = [USER, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=[RUN, OTHER], max_tokens=200)
    assert TOOL_FAMILIES[family].tokenizer.decode(written(family), skip_special_tokens=False).split("I do. ")[1] in (
        prompt_of(quire, family)
    )


async def test_the_text_of_a_call_streams(quire: Harness, family: str) -> None:
    quire.scheduler.script = one_by_one(written(family))
    fields = {"messages": [USER], "tools": [RUN], "max_tokens": 200, "stream": True}
    named = {"idempotency-key": f"stream-{family}"}
    response = await quire.http.post("/v1/chat/completions", json=fields, headers=named)
    rows = [row for row in response.text.split("\n\n") if "data: {" in row]
    choices = [json.loads(row.split("data: ")[1])["choices"][0] for row in rows]
    first, *others = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"], first["custom"]["name"]) == (0, "custom", "run")
    assert all(call.keys() == {"index", "custom"} and call["custom"].keys() == {"input"} for call in others)
    assert len([call for call in others if call["custom"]["input"]]) > 3
    assert "".join(call["custom"]["input"] for call in (first, *others)) == PROGRAM
    assert choices[-1]["finish_reason"] == "tool_calls"

    # From any event on, the rest follows.
    ids = [row.split("\n")[0].removeprefix("id: ") for row in rows]
    for place in (len(rows) // 3, len(rows) // 2, len(rows) - 3):
        resumed = await quire.http.post(
            "/v1/chat/completions", json=fields, headers={**named, "last-event-id": ids[place]}
        )
        rest = [row for row in resumed.text.split("\n\n") if "data: {" in row]
        texts = [
            "".join(
                call["custom"]["input"]
                for row in part
                for call in json.loads(row.split("data: ")[1])["choices"][0]["delta"].get("tool_calls", ())
            )
            for part in (rows[: place + 1], rest)
        ]
        assert "".join(texts) == PROGRAM


async def test_a_response_has_the_call_as_an_item(quire: Harness, client: openai.AsyncOpenAI, family: str) -> None:
    quire.scheduler.script = answer_with(written(family), stop_token_id=EOS)
    response = await client.responses.create(model=MODEL, input="Run it.", tools=[RUN_ITEM], max_output_tokens=200)
    message, call = response.output
    assert message.type == "message"
    assert isinstance(call, ResponseCustomToolCall)
    assert (call.name, call.input) == ("run", PROGRAM)

    quire.scheduler.script = answer_with([EOS], stop_token_id=EOS)
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    items: list[Any] = [USER, call.model_dump(exclude_none=True), result]
    await client.responses.create(model=MODEL, input=items, tools=[RUN_ITEM], max_output_tokens=200)
    prompt = prompt_of(quire, family)
    assert "done" in prompt
    assert TOOL_FAMILIES[family].tokenizer.decode(written(family), skip_special_tokens=False)[-60:] in prompt


async def test_events_of_a_response_have_the_text(quire: Harness, client: openai.AsyncOpenAI, family: str) -> None:
    quire.scheduler.script = one_by_one(written(family))
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "run"}]}
    stream = await client.responses.create(
        model=MODEL, input="Run it.", tools=[RUN_ITEM], tool_choice=choice, max_output_tokens=200, stream=True
    )
    events = await events_of(stream)
    kind = "response.custom_tool_call_input"
    assert "".join(event["delta"] for event in events if event["type"] == f"{kind}.delta") == PROGRAM
    (done,) = [event for event in events if event["type"] == f"{kind}.done"]
    assert done["input"] == PROGRAM
    assert events[-1]["response"]["tool_choice"] == choice
    assert events[-1]["response"]["output"][-1]["input"] == PROGRAM


QUESTION = Message("user", USER["content"])
RUN_TOOL = CustomTool("run", "Runs a program.")


@pytest_asyncio.fixture(loop_scope="module")
async def quire_client(quire: Harness) -> AsyncIterator[AsyncClient]:
    """Quire's own client."""
    async with AsyncClient(f"127.0.0.1:{quire.gateway.grpc_port}") as own:
        yield own


async def test_a_call_over_grpc_has_its_text(quire: Harness, quire_client: AsyncClient, family: str) -> None:
    quire.scheduler.script = answer_with(written(family), stop_token_id=EOS)
    tools: list[CustomTool | Tool] = [RUN_TOOL, Tool("now")]
    answer = await quire_client.chat([QUESTION], tools=tools, max_tokens=200)
    assert (answer.text, answer.finish_reason) == ("I do.", FinishReason.TOOL_CALLS)
    (call,) = answer.tool_calls
    assert (call.name, call.input, call.arguments) == ("run", PROGRAM, "")
    assert call.id.startswith("call_")

    def blocking() -> Any:
        with Client(f"127.0.0.1:{quire.gateway.grpc_port}") as other:
            return other.chat([QUESTION], tools=tools, max_tokens=200).tool_calls

    (same,) = await asyncio.to_thread(blocking)
    assert (same.name, same.input, same.arguments) == ("run", PROGRAM, "")

    # The call and its result go back to the model.
    quire.scheduler.script = answer_with([EOS], stop_token_id=EOS)
    messages = [QUESTION, Message("assistant", "I do.", [call]), Message("tool", "done", tool_call_id=call.id)]
    await quire_client.chat(messages, tools=tools, max_tokens=200)
    prompt = prompt_of(quire, family)
    assert "done" in prompt
    assert TOOL_FAMILIES[family].tokenizer.decode(written(family), skip_special_tokens=False).split("I do. ")[1] in (
        prompt
    )


async def test_the_text_of_a_call_streams_over_grpc(quire: Harness, quire_client: AsyncClient, family: str) -> None:
    token_ids = [*written(family), EOS]
    quire.scheduler.script = one_by_one(token_ids[:-1])
    allowed = AllowedTools(["run"], "required")
    options: Any = {"tools": [RUN_TOOL], "tool_choice": allowed, "max_tokens": 200, "request_id": f"grpc-{family}"}
    chunks = [chunk async for chunk in quire_client.stream_chat([QUESTION], **options)]
    first, *others = [piece for chunk in chunks for piece in chunk.tool_calls]
    assert (first.index, first.name) == (0, "run")
    assert len([piece for piece in others if piece.input]) > 3
    assert all(piece.input is not None and not (piece.arguments or piece.id or piece.name) for piece in others)
    assert "".join(piece.input or "" for piece in (first, *others)) == PROGRAM

    # From any token on, the rest follows.
    submit = quire.scheduler.all("submit")[-1]

    def attach(session: ScriptedSession, _: scheduler_v1.Attach) -> None:
        session.attached(submit, scheduler_v1.Tokens(token_ids=token_ids, end=stop_end(EOS)))

    quire.scheduler.attach_script = attach
    for position in range(0, len(token_ids), 7):
        known = [chunk for chunk in chunks if chunk.offset < position]
        rest = [chunk async for chunk in quire_client.resume(options["request_id"], {0: position})]
        pieces = [piece for chunk in (*known, *rest) for piece in chunk.tool_calls]
        assert "".join(piece.input or "" for piece in pieces) == PROGRAM
        assert [piece.name for piece in pieces if piece.name] == ["run"]
    whole = await quire_client.resume(options["request_id"]).collect()
    assert [(call.name, call.input) for call in whole.tool_calls] == [("run", PROGRAM)]
