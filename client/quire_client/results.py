"""What calls return: frozen values, each made from its message by `from_proto`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from quire.inference.v1 import inference_pb2 as pb


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """End-of-text, a stop string or a stop token."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    TOOL_CALLS = "tool_calls"
    """As STOP, after at least one call of a tool."""
    OTHER = "other"
    """A reason that this version of the client does not know."""


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence. `matched` is the stop string or stop token, if one was found."""

    reason: FinishReason
    matched: str | int | None

    @classmethod
    def from_proto(cls, message: pb.Finish) -> "Finish":
        matched = message.WhichOneof("matched")
        return cls(
            reason=_FINISH_REASONS.get(message.reason, FinishReason.OTHER),
            matched=getattr(message, matched) if matched else None,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability, the top tokens of its position, and those requested.

    `token` is the token as text, with U+FFFD for a part of a character; `token_bytes` is exact.
    """

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple["TokenLogprob", ...]
    requested: tuple["TokenLogprob", ...] = ()

    @classmethod
    def from_proto(cls, message: pb.TokenLogprob) -> "TokenLogprob":
        return cls(
            token_id=message.token_id,
            token=message.text,
            token_bytes=message.token_bytes,
            logprob=message.logprob,
            top=tuple(map(cls.from_proto, message.top)),
            requested=tuple(map(cls.from_proto, message.requested)),
        )


@dataclass(frozen=True, slots=True)
class ReturnedPrompt:
    """A prompt as tokens and text, with the log-probability of each token but the first if requested."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]

    @classmethod
    def from_proto(cls, message: pb.Prompt) -> "ReturnedPrompt":
        return cls(
            token_ids=tuple(message.token_ids),
            text=message.text,
            logprobs=tuple(map(TokenLogprob.from_proto, message.logprobs)),
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Id, model and seed of an accepted request; the same seed repeats it.

    `is_durable`: it is recorded and survives the death of any process of the server; False while Redis is
    unavailable, and if its retention is "none".
    """

    request_id: str
    model: str
    seed: int
    is_durable: bool

    @property
    def identity(self) -> tuple[str, str, int]:
        """The fields that identify the request."""
        return (self.request_id, self.model, self.seed)

    @classmethod
    def from_proto(cls, message: pb.Acceptance) -> "Acceptance":
        return cls(request_id=message.request_id, model=message.model, seed=message.seed, is_durable=message.is_durable)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that were processed: of the prompt, generated over all sequences, of the prompt from the cache, and those
    generated that are reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    @classmethod
    def from_proto(cls, message: pb.Usage) -> "Usage":
        return cls(
            prompt_tokens=message.prompt_tokens,
            completion_tokens=message.completion_tokens,
            cached_tokens=message.cached_tokens,
            reasoning_tokens=message.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model. `arguments` is a JSON object as text, unless the sequence ended within it.

    `input` is the text of a call of a custom tool, whose `arguments` are empty; of a function's call it is None.
    """

    id: str
    name: str
    arguments: str = ""
    input: str | None = None

    @classmethod
    def from_proto(cls, message: pb.ToolCall) -> "ToolCall":
        return cls(id=message.id, name=message.name, arguments=message.arguments, input=_input_of(message))


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call `index` of a sequence. `id` and `name` are empty after the first piece.

    `input` is a piece of the text that a custom tool takes, in place of `arguments`; of a function's call it is None.
    """

    index: int
    id: str
    name: str
    arguments: str = ""
    input: str | None = None

    @classmethod
    def from_proto(cls, message: pb.ToolCallDelta) -> "ToolCallDelta":
        return cls(
            index=message.index,
            id=message.id,
            name=message.name,
            arguments=message.arguments,
            input=_input_of(message),
        )

    @classmethod
    def join(cls, pieces: "Sequence[ToolCallDelta]") -> ToolCall:
        """The call whose pieces these are, all of them and in their order."""
        inputs = [piece.input for piece in pieces if piece.input is not None]
        return ToolCall(
            id="".join(piece.id for piece in pieces),
            name="".join(piece.name for piece in pieces),
            arguments="".join(piece.arguments for piece in pieces),
            input="".join(inputs) if inputs else None,
        )


def _input_of(message: pb.ToolCall | pb.ToolCallDelta) -> str | None:
    return message.input if message.HasField("input") else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of sequence `index`: the text that is now due, and tokens from `offset` (0 is the first generated).

    `finish` is set on the last chunk of a sequence. Text may lag behind its tokens, for a possible stop
    string or an incomplete character. `reasoning` and `tool_calls` are not part of the text.
    """

    index: int
    offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.Chunk) -> "Chunk":
        return cls(
            index=message.index,
            offset=message.offset,
            text=message.text,
            token_ids=tuple(message.token_ids),
            logprobs=tuple(map(TokenLogprob.from_proto, message.logprobs)),
            finish=Finish.from_proto(message.finish) if message.HasField("finish") else None,
            reasoning=message.reasoning,
            tool_calls=tuple(map(ToolCallDelta.from_proto, message.tool_calls)),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole sequence. `logprobs` has an entry for each token if requested. `score` is set for ranked sequences.
    `reasoning` and `tool_calls` are not part of the text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish
    score: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def finish_reason(self) -> FinishReason:
        """Why the sequence ended."""
        return self.finish.reason

    @classmethod
    def from_proto(cls, message: pb.Completion) -> "Completion":
        return cls(
            index=message.index,
            text=message.text,
            token_ids=tuple(message.token_ids),
            logprobs=tuple(map(TokenLogprob.from_proto, message.logprobs)),
            finish=Finish.from_proto(message.finish),
            score=message.score if message.HasField("score") else None,
            reasoning=message.reasoning,
            tool_calls=tuple(map(ToolCall.from_proto, message.tool_calls)),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation: every sequence by index. Its properties are those of the first one."""

    acceptance: Acceptance
    completions: tuple[Completion, ...]
    usage: Usage
    prompt: ReturnedPrompt | None = None
    """With echo or prompt_logprobs."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.completions[0].text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first sequence, which is not part of the text."""
        return self.completions[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of tools of the first sequence, which are not part of the text."""
        return self.completions[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sequence."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the first sequence's tokens, if requested."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sequence ended."""
        return self.completions[0].finish_reason

    @property
    def request_id(self) -> str:
        """The request's id: the client's own, or a generated one."""
        return self.acceptance.request_id

    @property
    def model(self) -> str:
        """The model that served the request."""
        return self.acceptance.model

    @property
    def seed(self) -> int:
        """The seed in use; the same seed samples the same tokens again."""
        return self.acceptance.seed

    @classmethod
    def from_proto(cls, message: pb.GenerateResponse) -> "Generation":
        return cls(
            acceptance=Acceptance.from_proto(message.acceptance),
            completions=tuple(map(Completion.from_proto, message.completions)),
            usage=Usage.from_proto(message.usage),
            prompt=ReturnedPrompt.from_proto(message.prompt) if message.HasField("prompt") else None,
        )


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids of a text, and the context length: the most tokens of prompt and output together."""

    token_ids: tuple[int, ...]
    context_length: int

    @classmethod
    def from_proto(cls, message: pb.TokenizeResponse) -> "Tokenized":
        return cls(token_ids=tuple(message.token_ids), context_length=message.context_length)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `context_length` is the most tokens of prompt and output together; `aliases` are other names that
    requests may use."""

    name: str
    context_length: int
    vocab_size: int
    aliases: tuple[str, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.Model) -> "Model":
        return cls(
            name=message.name,
            context_length=message.context_length,
            vocab_size=message.vocab_size,
            aliases=tuple(message.aliases),
        )
