"""Long chats over gRPC: in the public contract a message may take two bytes."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gateway_calls import refused
from gateway_harness import Harness, reason_of
from gateway_svc import chats
from quire.inference.v1 import inference_pb2 as api
from tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.asyncio(loop_scope="module")


def generation(chat: api.Chat, **fields: Any) -> api.Generation:
    return api.Generation(chat=chat, **fields)


CALLS: dict[str, tuple[str, Callable[[Harness, api.Chat], Any]]] = {
    "Generate": (
        "generation.chat",
        lambda quire, chat: quire.stub.Generate(api.GenerateRequest(generation=generation(chat))),
    ),
    "StreamGenerate": (
        "generation.chat",
        lambda quire, chat: quire.stub.StreamGenerate(api.StreamGenerateRequest(generation=generation(chat))),
    ),
    "truncated": (
        "generation.chat",
        lambda quire, chat: quire.stub.Generate(
            api.GenerateRequest(generation=generation(chat, truncate_prompt_tokens=5))
        ),
    ),
    "Tokenize": ("chat", lambda quire, chat: quire.stub.Tokenize(api.TokenizeRequest(chat=chat))),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Where each message was converted."""
    used: list[threading.Thread] = []
    real = chats._message

    def converted(message: api.ChatMessage, path: str) -> chats.ChatMessage:
        used.append(threading.current_thread())
        return real(message, path)

    monkeypatch.setattr(chats, "_message", converted)
    return used


@pytest.mark.parametrize("name", CALLS)
async def test_more_messages_than_fit_are_refused_before_they_are_converted(
    name: str, shared: Harness, threads: list[threading.Thread]
) -> None:
    path, ask = CALLS[name]
    count = (16 if name == "truncated" else 1) * CONTEXT_LENGTH + 1
    error = await refused(ask(shared, api.Chat(messages=[api.ChatMessage()] * count)))
    assert reason_of(error) == ("CONTEXT_LENGTH_EXCEEDED", f"{path}.messages")
    assert not threads


@pytest.mark.parametrize("name", CALLS)
async def test_many_messages_are_converted_in_a_thread(
    name: str, shared: Harness, threads: list[threading.Thread]
) -> None:
    path, ask = CALLS[name]
    messages = [*[api.ChatMessage(role="user", content="a")] * 100, api.ChatMessage(role="none")]
    error = await refused(ask(shared, api.Chat(messages=messages)))
    assert reason_of(error) == ("INVALID_FIELD", f"{path}.messages[100].role")
    assert len(threads) == 101
    assert threading.main_thread() not in threads


async def test_many_calls_and_tools_count_too(shared: Harness, threads: list[threading.Thread]) -> None:
    _, ask = CALLS["Tokenize"]
    calls = [api.ToolCall(name="f")] * 100
    for chat in (
        api.Chat(messages=[api.ChatMessage(role="none", tool_calls=calls)]),
        api.Chat(messages=[api.ChatMessage(role="none")], tools=[api.Tool(name=f"f{index}") for index in range(100)]),
        api.Chat(messages=[api.ChatMessage(role="none")]),
    ):
        await refused(ask(shared, chat))
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True]
