"""Choices of answers in the formats of the OpenAI API: texts and messages, with their log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway_svc.http_api.openai.answer_options import TokenTexts
from gateway_svc.output import Chunk, FinishReason, TokenLogprob, ToolCallDelta
from gateway_svc.prompt_output import PromptOutput
from gateway_svc.rendering import Rendering
from gateway_svc.validated_request import Echo

Json = dict[str, Any]

# JSON has no infinity; this is the OpenAI API's value for a token with probability 0.
_MIN_LOGPROB = -9999.0


class Format(Protocol):
    """The format of one endpoint's choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    opening: Json | None
    """The endpoint's own fields of the first event of a choice, before any output; None: there is none."""

    def whole(self, chunk: Chunk, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None = None) -> Json:
        """The endpoint's own fields of a whole choice. `prompt` is set if it was requested."""
        ...

    def piece(
        self,
        chunk: Chunk,
        rendering: Rendering,
        texts: TokenTexts,
        is_first: bool,
        prompt: PromptOutput | None = None,
    ) -> Json:
        """The endpoint's own fields of a chunk of a choice."""
        ...

    def answer(self, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None) -> Json:
        """The endpoint's own fields of a whole answer, by its first prompt."""
        ...

    def finish_reason(self, reason: FinishReason) -> str:
        """The reason as this endpoint spells it."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a message has calls of tools. `is_legacy`: as one function_call. `is_named`: the client has named the tool,
    and as in OpenAI's API its call is no reason of its own to finish."""

    is_legacy: bool = False
    is_named: bool = False

    @property
    def finish_reason(self) -> str:
        """Of an answer with calls."""
        if self.is_named:
            return "stop"
        return "function_call" if self.is_legacy else "tool_calls"


TOOL_CALLS = CallFormat()


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, calls: CallFormat = TOOL_CALLS, echoed: str = "") -> None:
        """Answers begin with `echoed`."""
        self._calls = calls
        self._echoed = echoed
        self.opening: Json | None = {"delta": {"role": "assistant", "content": echoed}, "logprobs": None}

    def whole(self, chunk: Chunk, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None = None) -> Json:
        text = self._echoed + chunk.text
        message: Json = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
        if chunk.reasoning:
            message |= _reasoning(chunk)
        if chunk.tool_calls:
            message["content"] = text or None
            message |= self._whole_calls(chunk)
        return {"message": message, "logprobs": self._logprobs(chunk, rendering, texts)}

    def answer(self, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None) -> Json:
        return _prompt_logprobs(rendering, texts, prompt)

    def piece(
        self,
        chunk: Chunk,
        rendering: Rendering,
        texts: TokenTexts,
        is_first: bool,
        prompt: PromptOutput | None = None,
    ) -> Json:
        """A delta of a message."""
        delta: Json = {}
        if chunk.reasoning:
            delta |= _reasoning(chunk)
        if chunk.tool_calls:
            delta |= self._call_deltas(chunk)
        if chunk.text or not (chunk.reasoning or chunk.tool_calls):
            delta["content"] = chunk.text
        return {"delta": delta, "logprobs": self._logprobs(chunk, rendering, texts)}

    def finish_reason(self, reason: FinishReason) -> str:
        return self._calls.finish_reason if reason is FinishReason.TOOL_CALLS else reason.value

    def _whole_calls(self, chunk: Chunk) -> Json:
        if self._calls.is_legacy:
            return {"function_call": _called(chunk.tool_calls[0])}
        return {
            "tool_calls": [
                {"id": call.id, "type": _kind(call), _kind(call): _called(call)} for call in chunk.tool_calls
            ]
        }

    def _call_deltas(self, chunk: Chunk) -> Json:
        """The first piece of a call has its id, its type and its name."""
        deltas: list[Json] = []
        for call in chunk.tool_calls:
            kind = _kind(call)
            if call.id:
                delta: Json = {"index": call.index, "id": call.id, "type": kind, kind: _called(call)}
            else:
                delta = {"index": call.index, kind: _given(call)}
            deltas.append(delta)
        if self._calls.is_legacy:
            return {"function_call": deltas[0]["function"]}
        return {"tool_calls": deltas}

    def _logprobs(self, chunk: Chunk, rendering: Rendering, texts: TokenTexts) -> Json | None:
        if rendering.logprobs is None:
            return None
        return {"content": [chat_logprob(one, texts) for one in chunk.logprobs], "refusal": None}


def _kind(call: ToolCallDelta) -> str:
    """The type of a call, which is also the name of its field."""
    return "custom" if call.is_custom else "function"


def _called(call: ToolCallDelta) -> Json:
    return {"name": call.name, **_given(call)}


def _given(call: ToolCallDelta) -> Json:
    return {"input" if call.is_custom else "arguments": call.arguments}


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    opening: Json | None = None

    def finish_reason(self, reason: FinishReason) -> str:
        return reason.value

    def whole(self, chunk: Chunk, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None = None) -> Json:
        choice = self.piece(chunk, rendering, texts, is_first=True, prompt=prompt)
        return choice | _prompt_logprobs(rendering, texts, prompt)

    def answer(self, rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None) -> Json:
        return {}

    def piece(
        self,
        chunk: Chunk,
        rendering: Rendering,
        texts: TokenTexts,
        is_first: bool,
        prompt: PromptOutput | None = None,
    ) -> Json:
        """With echo the text begins with the prompt, whose first token has no log-probability."""
        echoed = prompt if rendering.echo is Echo.PRESENT else None
        before = echoed if is_first else None
        logprobs: Json | None = None
        if rendering.logprobs is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            if before is not None:
                _add(logprobs, texts.token_text(before.token_ids[0]), None, None, 0)
            for one in before.logprobs if before is not None else ():
                text, top = texts.token_text(one.token_id), _top_by_text(one, texts)
                _add(logprobs, text, _finite(one.logprob), top, one.text_offset)
            start = 0 if echoed is None else len(echoed.text)
            for one in chunk.logprobs:
                text, top = texts.token_text(one.token_id), _top_by_text(one, texts)
                _add(logprobs, text, _finite(one.logprob), top, start + one.text_offset)
        text = chunk.text if before is None else before.text + chunk.text
        return {"text": text, "logprobs": logprobs, "stop_reason": None}  # in each event, as in vLLM


def _reasoning(chunk: Chunk) -> Json:
    """Reasoning under both of its names: earlier clients of vLLM and those of SGLang and DeepSeek read the longer."""
    return {"reasoning": chunk.reasoning, "reasoning_content": chunk.reasoning}


def chat_logprob(logprob: TokenLogprob, texts: TokenTexts) -> Json:
    """A token's log-probability in the format of chats."""
    sampled = _chat_token(logprob.token_id, logprob.logprob, texts)
    others = _others(logprob)
    sampled["top_logprobs"] = [_chat_token(token_id, value, texts) for token_id, value in others]
    return sampled


def _others(logprob: TokenLogprob) -> Sequence[tuple[int, float]]:
    """The top tokens; of a request that names tokens, these and the sampled one instead, each once, as in vLLM."""
    if not logprob.requested:
        return logprob.top
    return list(dict([(logprob.token_id, logprob.logprob), *logprob.requested]).items())


def _add(logprobs: Json, text: str, value: float | None, top: Json | None, offset: int) -> None:
    """Adds a token to log-probabilities of a completion."""
    logprobs["tokens"].append(text)
    logprobs["token_logprobs"].append(value)
    logprobs["top_logprobs"].append(top)
    logprobs["text_offset"].append(offset)


def _prompt_logprobs(rendering: Rendering, texts: TokenTexts, prompt: PromptOutput | None) -> Json:
    """The log-probabilities of a prompt, as vLLM has them: null for the first token, then objects by token id."""
    if prompt is None or rendering.prompt_logprobs is None:
        return {"prompt_logprobs": None}
    return {"prompt_logprobs": [None, *(_by_token_id(one, texts) for one in prompt.logprobs)]}


def _by_token_id(logprob: TokenLogprob, texts: TokenTexts) -> Json:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprob.top, start=1)}
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": ranks.get(token_id),
            "decoded_token": texts.piece(token_id).decode("utf-8", "replace"),  # the object's name is the id
        }
        for token_id, value in dict([(logprob.token_id, logprob.logprob), *logprob.top]).items()
    }


def _chat_token(token_id: int, logprob: float, texts: TokenTexts) -> Json:
    return {
        "token": texts.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(texts.piece(token_id)),
    }


def _top_by_text(logprob: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """The top tokens and the token itself, by their text; of equal texts the more probable one stays. The token itself
    is the first, as in vLLM."""
    by_text: dict[str, float] = {}
    for token_id, value in (*_others(logprob), (logprob.token_id, logprob.logprob)):
        by_text.setdefault(texts.token_text(token_id), _finite(value))
    own = texts.token_text(logprob.token_id)
    return {own: by_text[own], **by_text}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
