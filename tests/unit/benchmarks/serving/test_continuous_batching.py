"""The server around transformers' continuous batching, with a scripted manager."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.serving.continuous_batching import Completions


@dataclass
class Result:
    generated_tokens: list[int]
    ends: bool = False
    error: str | None = None

    def is_finished(self) -> bool:
        return self.ends


@dataclass
class Manager:
    results: list[Result]
    handler: Callable[[Result], None] | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    accepts: bool = True

    def register_result_handler(self, request_id: str, handler: Callable[[Result], None]) -> None:
        self.handler = handler

    def add_request(self, prompt: list[int], **asked: Any) -> str | None:
        self.asked = asked | {"prompt": prompt}
        assert self.handler is not None
        for result in self.results:
            self.handler(result)
        return "id" if self.accepts else None


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


async def ask(manager: Manager, tokenizer: Tokenizer) -> list[Any]:
    app = Starlette(routes=Completions(manager, tokenizer, "tiny").routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        answer = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_text_streams_as_tokens_come_and_usage_ends_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé").ids
    manager = Manager([Result(ids[:1]), Result(ids[:2]), Result(ids, ends=True)])
    *texts, usage, done = await ask(manager, tokenizer)
    assert [event["choices"][0]["text"] for event in texts] == ["a", "é"]
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert done == "[DONE]"
    assert manager.asked["prompt"] == [1, 2]
    assert (manager.asked["max_new_tokens"], manager.asked["eos_token_id"]) == (3, -1)


@pytest.mark.parametrize("manager", [Manager([Result([], error="no room")]), Manager([], accepts=False)])
async def test_errors_are_sent_in_the_stream(manager: Manager, tokenizer: Tokenizer) -> None:
    (event,) = await ask(manager, tokenizer)
    assert event["error"]["message"]
