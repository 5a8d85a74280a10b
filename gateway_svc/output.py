"""The output of a request: chunks of its sequences, their ends, and the usage."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc.vocabulary import Vocabulary
from quire.inference.v1 import inference_pb2
from quire.worker.v1 import worker_pb2


class FinishReason(Enum):
    """Why a sequence ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"

    def to_proto(self) -> inference_pb2.FinishReason:
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: inference_pb2.FINISH_REASON_TOOL_CALLS,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence. `matched` is the stop string or the stop token that ended it."""

    reason: FinishReason
    matched: str | int | None = None

    def stop_reason(self, stop_token_ids: Sequence[int]) -> str | int | None:
        """The stop string or stop token of the request that ended it; as in vLLM not end-of-text."""
        return None if isinstance(self.matched, int) and self.matched not in stop_token_ids else self.matched

    def to_proto(self) -> inference_pb2.Finish:
        finish = inference_pb2.Finish(reason=self.reason.to_proto())
        match self.matched:
            case str(stop):
                finish.stop = stop
            case int(token_id):
                finish.token_id = token_id
        return finish


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a sampled token, and the top-k (token, log-probability) at its position.

    `text_offset` is where the token begins in the sequence's text, in characters. `requested` are the same pairs of the
    tokens that the request named.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text_offset: int
    requested: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_proto(
        cls,
        token_id: int,
        logprobs: worker_pb2.TokenLogprobs,
        num_top: int,
        text_offset: int,
        requested: Sequence[int] = (),
    ) -> "TokenLogprob":
        """From the worker's log-probabilities of `token_id`. A beam search has more top tokens than were requested."""
        top = tuple((other.token_id, other.logprob) for other in logprobs.top[:num_top])
        named = tuple(zip(requested, logprobs.requested, strict=True)) if requested else ()
        return cls(token_id, logprobs.logprob, top, text_offset, named)

    def to_worker_proto(self) -> worker_pb2.TokenLogprobs:
        """The log-probabilities as the worker sent them, with the top tokens that were requested."""
        top = [worker_pb2.Logprob(token_id=token_id, logprob=logprob) for token_id, logprob in self.top]
        requested = [logprob for _, logprob in self.requested]
        return worker_pb2.TokenLogprobs(logprob=self.logprob, top=top, requested=requested)

    def to_proto(self, vocabulary: Vocabulary) -> inference_pb2.TokenLogprob:
        sampled = _token_to_proto(self.token_id, self.logprob, vocabulary)
        sampled.top.extend(_token_to_proto(token_id, logprob, vocabulary) for token_id, logprob in self.top)
        sampled.requested.extend(_token_to_proto(token_id, logprob, vocabulary) for token_id, logprob in self.requested)
        return sampled


def _token_to_proto(token_id: int, logprob: float, vocabulary: Vocabulary) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=token_id,
        text=vocabulary.token_text(token_id),
        token_bytes=vocabulary.piece(token_id),
        logprob=logprob,
    )


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of call `index` of a sequence. `id` and `name` are set in its first piece, and empty in others.
    `is_custom`: the tool takes a text, of which `arguments` is a piece."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    is_custom: bool = False

    def after(self, known: "ToolCallDelta | None") -> "ToolCallDelta":
        """The rest of the call for a client that has `known` of it."""
        if known is None:
            return self
        return ToolCallDelta(self.index, self.arguments[len(known.arguments) :], is_custom=self.is_custom)

    def to_proto(self) -> inference_pb2.ToolCallDelta:
        if self.is_custom:
            return inference_pb2.ToolCallDelta(index=self.index, id=self.id, name=self.name, input=self.arguments)
        return inference_pb2.ToolCallDelta(index=self.index, id=self.id, name=self.name, arguments=self.arguments)

    def to_whole(self) -> inference_pb2.ToolCall:
        """A piece that is a whole call, in the public contract."""
        if self.is_custom:
            return inference_pb2.ToolCall(id=self.id, name=self.name, input=self.arguments)
        return inference_pb2.ToolCall(id=self.id, name=self.name, arguments=self.arguments)


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence from `offset` on, counted from the end of the prompt, and the text that is due with them.
    `logprobs` has one for each token where they were requested. `score`, by which the sequence was ranked, is set in
    its last chunk. `reasoning` and `tool_calls` are not part of the text. `text_tokens` are the tokens of the text, by
    their places in the sequence, in chunks of single tokens with `logprobs`. `ended_calls` are the indices of calls of
    which nothing follows."""

    index: int
    offset: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    text_tokens: tuple[int, ...] = ()
    ended_calls: tuple[int, ...] = ()

    @property
    def has_output(self) -> bool:
        """Whether anything of it is due."""
        return bool(self.text or self.logprobs or self.finish or self.reasoning or self.tool_calls)

    @property
    def num_logprobs(self) -> int:
        """How many log-probabilities it has. Each takes about 10 µs to render."""
        if not self.logprobs:
            return 0
        first = self.logprobs[0]
        return len(self.logprobs) * (1 + len(first.top) + len(first.requested))

    def to_proto(self, vocabulary: Vocabulary) -> inference_pb2.Chunk:
        chunk = inference_pb2.Chunk()
        self.write_to(chunk, vocabulary)
        return chunk

    def write_to(self, chunk: inference_pb2.Chunk, vocabulary: Vocabulary) -> None:
        """Sets the fields of an empty chunk of the public contract."""
        # For each token of a stream, in the response: a chunk of its own would be copied there, and an argument of a
        # message takes twice as long as a field that is set.
        if self.index:
            chunk.index = self.index
        chunk.offset = self.offset
        chunk.token_ids.extend(self.token_ids)
        if self.text:
            chunk.text = self.text
        if self.logprobs:
            chunk.logprobs.extend([logprob.to_proto(vocabulary) for logprob in self.logprobs])
        if self.finish is not None:
            chunk.finish.CopyFrom(self.finish.to_proto())
        if self.reasoning:
            chunk.reasoning = self.reasoning
        if self.tool_calls:
            chunk.tool_calls.extend([call.to_proto() for call in self.tool_calls])

    def to_completion(self, vocabulary: Vocabulary) -> inference_pb2.Completion:
        """A chunk that is a whole sequence, in the public contract."""
        chunk = self.to_proto(vocabulary)
        return inference_pb2.Completion(
            index=chunk.index,
            text=chunk.text,
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            finish=chunk.finish,
            score=self.score,
            reasoning=chunk.reasoning,
            tool_calls=[call.to_whole() for call in self.tool_calls],
        )


def merge_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """All chunks of each sequence as one, by index."""
    parts: defaultdict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.index].append(chunk)
    return [_merged(parts[index]) for index in sorted(parts)]


def _merged(parts: Sequence[Chunk]) -> Chunk:
    """All chunks of a sequence as one. Each text is joined once: there may be a part for each of 100,000 tokens."""
    first, last = parts[0], parts[-1]
    return Chunk(
        first.index,
        first.offset,
        "".join([part.text for part in parts]),
        [token_id for part in parts for token_id in part.token_ids],
        [logprob for part in parts for logprob in part.logprobs],
        last.finish,
        last.score,
        "".join([part.reasoning for part in parts]),
        merge_calls([call for part in parts for call in part.tool_calls]),
        ended_calls=tuple([index for part in parts for index in part.ended_calls]),
    )


def merge_calls(pieces: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """All pieces of each call as one, by index."""
    parts: defaultdict[int, list[ToolCallDelta]] = defaultdict(list)
    for piece in pieces:
        parts[piece.index].append(piece)
    return [
        ToolCallDelta(
            index,
            "".join([part.arguments for part in of_call]),
            next((part.id for part in of_call if part.id), ""),
            next((part.name for part in of_call if part.name), ""),
            of_call[0].is_custom,
        )
        for index, of_call in sorted(parts.items())
    ]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that were processed for a request, or for several. `reasoning_tokens` are among `completion_tokens`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def to_proto(self) -> inference_pb2.Usage:
        return inference_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )
