"""What calls return, with the names of vLLM's classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway_svc.output import Chunk, TokenLogprob
from gateway_svc.vocabulary import Vocabulary
from quire_client.results import ToolCall

V = TypeVar("V")

ABORTED = "abort"
"""Why a sequence ended whose request was aborted."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token. `rank` is 1 for the most probable one; None: it is not among those returned."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence. `logprobs` has for each token the sampled one and the top ones, by id, where they were requested;
    `cumulative_logprob` is the sum over the sampled ones.

    `finish_reason` is "stop", "length", "tool_calls" or "abort", and None while the sequence runs; `stop_reason` is the
    request's stop string or stop token that ended it, and None after end-of-text. `reasoning` and `tool_calls` of a
    chat's answer are not part of the text. `score` ranks sequences of beam searches and of `best_of`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the sequence has ended. A method, as in vLLM."""
        return self.finish_reason is not None

    @classmethod
    def of(
        cls,
        chunk: Chunk,
        vocabulary: Vocabulary,
        *,
        has_logprobs: bool,
        stop_token_ids: Sequence[int] = (),
        was_aborted: bool = False,
    ) -> "CompletionOutput":
        """From a chunk with all of a sequence so far. `stop_token_ids` are those of the request."""
        reason = chunk.finish.reason.value if chunk.finish is not None else ABORTED if was_aborted else None
        return cls(
            index=chunk.index,
            text=chunk.text,
            token_ids=list(chunk.token_ids),
            cumulative_logprob=sum(one.logprob for one in chunk.logprobs) if has_logprobs else None,
            logprobs=[logprobs_at(one, vocabulary) for one in chunk.logprobs] if has_logprobs else None,
            finish_reason=reason,
            stop_reason=None if chunk.finish is None else chunk.finish.stop_reason(stop_token_ids),
            score=chunk.score,
            reasoning=chunk.reasoning,
            tool_calls=[ToolCall.from_proto(call.to_whole()) for call in chunk.tool_calls],
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its sequences, in the order of their indices. `prompt` is None for a prompt of token ids.

    `prompt_logprobs` has None for the first token, as no token precedes it. `seed` repeats the sampling.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ValueRequestOutput(Generic[V]):
    """A prompt, or a pair of texts, and its value."""

    request_id: str
    outputs: V
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector: 32-bit floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


class EmbeddingRequestOutput(ValueRequestOutput[EmbeddingOutput]):
    """A prompt and its vector."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A number for each label of the model's head: probabilities, if its activation function makes them."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


class ClassificationRequestOutput(ValueRequestOutput[ClassificationOutput]):
    """A prompt and its numbers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of two texts: the output of a cross-encoder, or the cosine of their vectors, -1 to 1."""

    score: float


class ScoringRequestOutput(ValueRequestOutput[ScoringOutput]):
    """A pair of texts and its score. `prompt_token_ids` are those of the pair, or of the first text and the second."""

    __slots__ = ()


def logprobs_at(logprob: TokenLogprob, vocabulary: Vocabulary) -> dict[int, Logprob]:
    """The log-probabilities at one position, the sampled token first."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprob.top, 1)}
    found: dict[int, Logprob] = {}
    for token_id, value in ((logprob.token_id, logprob.logprob), *logprob.top, *logprob.requested):
        found.setdefault(token_id, Logprob(value, ranks.get(token_id), vocabulary.token_text(token_id)))
    return found
