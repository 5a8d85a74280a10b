"""Bodies with many prompts: what these have in common is prepared once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from gateway_harness import Harness, encoded
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.stop_strings import StopString
from gateway_svc.tokenizer import ModelTokenizer
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import answer_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 32
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a"] * COUNT}),
    ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * COUNT}),
]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often fields were prepared."""
    counts = Counter[str]()

    def count(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(StopString, "compile")
    count(ModelTokenizer, "encode_words")
    count(GrammarChecker, "grammar")
    return counts


async def submits(quire: Harness, path: str, body: dict[str, Any]) -> list[scheduler_v1.Submit]:
    """The requests of a body."""
    quire.scheduler.script = answer_with(encoded("hello"))
    num_before = len(quire.scheduler.all("submit"))
    response = await quire.http.post(path, json={**body, "max_tokens": 5})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == COUNT
    return list(quire.scheduler.all("submit")[num_before:])


@pytest.mark.parametrize(("path", "body"), BODIES, ids=["completions", "batch"])
async def test_fields_are_prepared_once_for_all_prompts_of_a_body(
    path: str, body: dict[str, Any], shared: Harness, prepared: Counter[str]
) -> None:
    fields = {"stop": ["x" * 1_000, "y", "x" * 1_000], "bad_words": ["he"]}
    sent = await submits(shared, path, {**body, **fields})
    assert prepared == {"compile": 2, "encode_words": 1}
    first = sent[0]
    assert list(first.render_options.stops) == ["x" * 1_000, "y"]
    assert first.sampling.bad_words
    assert len({one.sampling.seed for one in sent}) == COUNT
    assert {one.body_digest for one in sent} == {first.body_digest}


@pytest.mark.parametrize(("path", "body"), BODIES, ids=["completions", "batch"])
async def test_a_constraint_is_checked_once_for_all_prompts_of_a_body(
    path: str, body: dict[str, Any], shared: Harness, prepared: Counter[str]
) -> None:
    sent = await submits(shared, path, {**body, "structured_outputs": {"choice": ["hello", "world"]}})
    assert prepared == {"grammar": 1}
    assert {one.sampling.grammar for one in sent} == {sent[0].sampling.grammar}
    assert sent[0].sampling.grammar
