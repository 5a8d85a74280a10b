"""Calls of a gateway for embeddings, and the vectors that its scheduler computes."""

import asyncio
from collections.abc import Sequence
from typing import Any

from encoder_model import CONTEXT_LENGTH, WORDS, ids
from gateway_harness import Harness
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1

LIMITS = {"context_length": CONTEXT_LENGTH, "vocab_size": len(WORDS)}
"""Of the model, for `running_gateway`."""

TEXTS = ["hello world", "a b c"]


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """Four numbers, which differ with the prompt."""
    return [float(len(token_ids)), sum(token_ids) / 8, -0.5, 0.25]


VECTORS = [vector_of(ids("[CLS] hello world [SEP]")), vector_of(ids("[CLS] a b c [SEP]"))]
"""Of the texts."""


def asking(*texts: str, **fields: Any) -> api.EmbedRequest:
    """A request to embed texts, by default the two."""
    return api.EmbedRequest(inputs=[api.EmbedInput(text=text) for text in texts or TEXTS], **fields)


def begun(protocol: str, quire: Harness, texts: Sequence[str]) -> Any:
    """A call over either protocol."""
    if protocol == "http":
        return asyncio.create_task(quire.http.post("/v1/embeddings", json={"input": texts}))
    return quire.stub.Embed(asking(*texts))


async def leave(quire: Harness, call: Any, num_inputs: int) -> None:
    """Leaves a call once all its inputs are accepted, and asserts that each is cancelled."""
    submits = await until_submitted(quire, num_inputs)
    for submit in submits:
        quire.scheduler.session.accept(submit.key)
    call.cancel()
    cancelled = [(await quire.scheduler.next("cancel")).key for _ in submits]
    assert sorted(cancelled) == sorted(submit.key for submit in submits)


async def until_submitted(quire: Harness, number: int) -> list[scheduler_v1.Submit]:
    """Waits for so many submissions."""
    return [await quire.scheduler.next("submit") for _ in range(number)]
