"""Builds requests for scores from Python values: pure functions, shared by both clients."""

from collections.abc import Sequence
from typing import TypedDict

from quire.inference.v1 import inference_pb2 as pb
from quire_client.fields import assign
from quire_client.requests import Retention, TruncationSide
from quire_client.value_options import assign_options


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of `score`. None is the same as absent; the server checks ranges."""

    model: str | None
    """A name or an alias from `models()`. Absent: the first model of the gateway."""
    max_tokens_per_query: int | None
    """Cuts queries to this many tokens, not counting special ones. Absent: they are not cut."""
    max_tokens_per_document: int | None
    """Cuts documents likewise."""
    truncate_prompt_tokens: int | None
    """Keep this many tokens of each pair, or of each text with a model that computes embeddings; -1: as many as fit.
    Absent: what is too long is refused.
    """
    truncation_side: TruncationSide | None
    """Where texts are cut. Absent: at the right, so that the first tokens are kept."""
    raw_scores: bool | None
    """Return a cross-encoder's output without its activation function. Absent: False."""
    priority: int | None
    """Requests of a higher priority run first. Absent: 0."""
    instruction: str | None
    """What the query asks for, in place of the instruction of the model's files, for models whose chat template writes
    one beside a pair. Absent: that of the files.
    """
    retention: Retention | None
    """How long Redis keeps the records of the prompts. Absent: there are none."""
    timeout: float | None
    """Deadline in seconds. Absent: the client's."""
    traceparent: str | None
    """The W3C trace that the call belongs to."""


def score_request(
    queries: str | Sequence[str], documents: str | Sequence[str], options: ScoreOptions
) -> pb.ScoreRequest:
    """A request for scores. Raises as requests.completion_request."""
    request = pb.ScoreRequest()
    assign_options(request, options, ScoreOptions.__annotations__)
    for name, texts in (("queries", queries), ("documents", documents)):
        assign(request, name, [texts] if isinstance(texts, str) else texts)
    return request
