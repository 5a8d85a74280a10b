"""The limit of the reasoning with the real model: two tokens that it has to spare are the markers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployment import Deployment, deployment
from quire_client import Client, Message

MARKERS = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}
END = 12  # the id of </think>
QUESTION = "What is the capital of France?"
ANSWER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose prompts end within the reasoning."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / file).read_text()
        for spare, marker in MARKERS.items():
            text = text.replace(spare, marker)
        (folder / file).write_text(text)
    template = folder / "template.jinja"
    template.write_text((model / "chat_template.jinja").read_text().replace(ANSWER, f"{ANSWER}<think>\n"))
    settings = {"tokenizer": str(folder), "chat_template": str(template), "reasoning_format": "think"}
    with deployment(**settings, gateways=2) as started:
        yield started


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_the_reasoning_has_as_many_tokens_as_it_may(limit: int, running: Deployment) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}],
        "thinking_token_budget": limit,
        "return_token_ids": True,
        "max_tokens": 60,
        "temperature": 1,
        "seed": 3,
        "n": 3,
    }
    answer = httpx.post(f"{running.http}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    for choice in choices:
        assert choice["token_ids"].index(END) <= limit
    has_reasoning = [bool(choice["message"].get("reasoning")) for choice in choices]
    # The only token of a sampled one may be white space.
    assert any(has_reasoning) if limit == 1 else has_reasoning == [limit > 0] * 3
    used = answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert used <= 3 * (limit + 2)


def test_both_protocols_and_gateways_end_it_alike(running: Deployment) -> None:
    options: Any = {"max_reasoning_tokens": 7, "temperature": 0, "max_tokens": 40}
    answers = []
    for address in running.state["grpc"]:
        with Client(address) as client:
            answers.append(client.chat([Message("user", QUESTION)], **options))
            chunks = list(client.stream_chat([Message("user", QUESTION)], **options))
            assert "".join(chunk.reasoning for chunk in chunks) == answers[-1].reasoning
    assert answers[0].token_ids.index(END) == 7
    assert (answers[0].token_ids, answers[0].text) == (answers[1].token_ids, answers[1].text)
