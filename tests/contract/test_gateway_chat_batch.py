"""Several chats in one call, as vLLM has them, with a scripted scheduler."""

from typing import Any

import pytest

from gateway_harness import Harness, encoded
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import ScriptedSession, stop_end
from tiny_model import EOS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions/batch"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def script(session: ScriptedSession, submit: scheduler_v1.Submit) -> None:
    """Answers a chat with the number of its prompt's tokens, in each of its sequences."""
    session.accept(submit.key)
    for index in range(submit.n):
        tokens = [*encoded("hello " * len(submit.prompt_token_ids)), EOS]
        session.tokens(submit.key, tokens, 0, index, end=stop_end(EOS))


async def test_choices_come_chat_by_chat(shared: Harness) -> None:
    shared.scheduler.script = script
    chats = [user("hello"), user("hello hello hello"), [{"role": "system", "content": "hello"}, *user("hello")]]
    fields = {"max_tokens": 200, "return_token_ids": True}
    answer = (await shared.http.post(PATH, json={"messages": chats, **fields})).json()
    singles = [
        (await shared.http.post("/v1/chat/completions", json={"messages": chat, **fields})).json() for chat in chats
    ]
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, single in zip(answer["choices"], singles, strict=True):
        assert choice["message"] == single["choices"][0]["message"]
        assert choice["prompt_token_ids"] == single["prompt_token_ids"]
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
    assert "prompt_token_ids" not in answer
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == sum(single["usage"][count] for single in singles)


async def test_each_chat_may_have_several_choices(shared: Harness) -> None:
    shared.scheduler.script = script
    answer = (await shared.http.post(PATH, json={"messages": [user("a"), user("b c")], "n": 2, "max_tokens": 9})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    first, second, third, fourth = (choice["message"]["content"] for choice in answer["choices"])
    assert (first, third) == (second, fourth)


async def test_a_call_that_is_repeated_has_the_same_answer(shared: Harness) -> None:
    shared.scheduler.script = script
    body, named = {"messages": [user("a"), user("b c")], "max_tokens": 9}, {"idempotency-key": "batch-1"}
    answers = [(await shared.http.post(PATH, json=body, headers=named)).json() for _ in range(2)]
    assert answers[0]["id"] == answers[1]["id"] == "chatcmpl-batch-1"
    assert [choice["message"] for choice in answers[0]["choices"]] == [
        choice["message"] for choice in answers[1]["choices"]
    ]
