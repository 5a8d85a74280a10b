"""Answers of HTTP calls."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway_svc.http_api import answer_sender
from gateway_svc.http_api.answer_sender import AnswerSender
from gateway_svc.http_api.events import long_json, to_json
from gateway_svc.output import Chunk
from gateway_svc.tenant_threads import TenantThreads


@pytest.mark.parametrize(
    ("num_values", "num_characters", "in_thread"),
    [(1, 0, False), (8_192, 0, False), (8_193, 0, True), (0, 65_536, False), (0, 65_537, True), (4_096, 40_000, True)],
)
def test_large_answers_are_rendered_in_a_thread(
    num_values: int, num_characters: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream of the gateway gets a token while the thread of the event loop renders JSON."""
    rendered_in: list[threading.Thread] = []

    def recorded(render: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def rendered(body: Any) -> bytes:
            rendered_in.append(threading.current_thread())
            return render(body)

        return rendered

    answers: list[bytes] = []

    async def respond(data: bytes, content_type: str) -> None:
        assert content_type == "application/json"
        answers.append(data)

    async def main() -> None:
        threads = TenantThreads(2, "test")
        exchange, call = SimpleNamespace(respond=respond), SimpleNamespace(tenant=SimpleNamespace(name="a"))
        body = {"tokens": [7] * num_values, "text": "a" * num_characters}
        await AnswerSender(threads).respond_with_values(
            cast(Any, exchange),
            cast(Any, call),
            lambda: body,
            num_values=num_values,
            num_characters=num_characters,
        )
        threads.close()

    monkeypatch.setattr(answer_sender, "to_json", recorded(to_json))
    monkeypatch.setattr(answer_sender, "long_json", recorded(long_json))
    asyncio.run(main())
    assert answers == [to_json({"tokens": [7] * num_values, "text": "a" * num_characters})]
    assert [thread is not threading.main_thread() for thread in rendered_in] == [in_thread]


@pytest.mark.parametrize(
    ("num_chunks", "num_prompt_logprobs", "in_thread"),
    [(1, 0, [False]), (128, 0, [False]), (129, 0, [True]), (1, 128, [True]), (600, 0, [True, True, False])],
)
def test_many_events_are_rendered_in_parts_and_in_threads(
    num_chunks: int, num_prompt_logprobs: int, in_thread: list[bool]
) -> None:
    """A step of a call with thousands of choices has thousands of events."""
    rendered: list[tuple[bool, int]] = []
    parts: list[bytes] = []

    steps = [[(0, Chunk(index, 0, "a")) for index in range(num_chunks)], []]

    class Group:
        async def next(self) -> Any:
            return steps.pop(0)

    class Exchange:
        async def start_events(self) -> None: ...

        async def send_events(self, data: bytes) -> None:
            parts.append(data)

        async def end_events(self, data: bytes) -> None:
            parts.append(data)

        def keep_alive(self, _: float) -> Any:
            return nullcontext()

    def event(_: int, chunk: Chunk) -> bytes:
        rendered.append((threading.current_thread() is not threading.main_thread(), chunk.index))
        return b"%d " % chunk.index

    async def main() -> None:
        threads = TenantThreads(2, "test")
        call = SimpleNamespace(tenant=SimpleNamespace(name="a"))
        await AnswerSender(threads).stream_events(
            cast(Any, Exchange()),
            cast(Any, call),
            cast(Any, Group()),
            event,
            lambda: b"end",
            num_prompt_logprobs=num_prompt_logprobs,
        )
        threads.close()

    asyncio.run(main())
    assert [index for _, index in rendered] == list(range(num_chunks))
    assert b"".join(parts) == b"".join(b"%d " % index for index in range(num_chunks)) + b"end"
    assert [rendered[first][0] for first in range(0, num_chunks, 256)] == in_thread
    assert [len(part.split()) for part in parts[:-1]] == [
        min(256, num_chunks - first) for first in range(0, num_chunks, 256)
    ]
