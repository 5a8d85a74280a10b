"""Answers in the formats of the OpenAI API: whole, and as events of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway_svc.openai_http.cursor import Cursor
from gateway_svc.openai_http.events import PLACEHOLDER, TextEventTemplate, sse_event
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, Usage
from gateway_svc.ranking import completed_sequences
from gateway_svc.rendering import Rendering
from gateway_svc.vocabulary import Vocabulary

Json = dict[str, Any]

# JSON has no infinity; this is the OpenAI API's value for a token with probability 0.
_MIN_LOGPROB = -9999.0

_DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """The format of one endpoint's choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def whole(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary) -> Json:
        """The endpoint's own fields of a whole choice."""
        ...

    def piece(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary, is_first: bool) -> Json:
        """The endpoint's own fields of a chunk of a choice."""
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

    def __init__(self, calls: CallFormat = TOOL_CALLS) -> None:
        self._calls = calls

    def whole(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary) -> Json:
        message: Json = {"role": "assistant", "content": chunk.text, "refusal": None}
        if chunk.reasoning:
            message["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            message["content"] = chunk.text or None
            message |= self._whole_calls(chunk)
        return {"message": message, "logprobs": self._logprobs(chunk, rendering, vocabulary)}

    def piece(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary, is_first: bool) -> Json:
        """A delta of a message; the first one has the role."""
        delta: Json = {"role": "assistant"} if is_first else {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            delta |= self._call_deltas(chunk)
        if chunk.text or not (chunk.reasoning or chunk.tool_calls):
            delta["content"] = chunk.text
        elif is_first:
            delta["content"] = None
        return {"delta": delta, "logprobs": self._logprobs(chunk, rendering, vocabulary)}

    def finish_reason(self, reason: FinishReason) -> str:
        return self._calls.finish_reason if reason is FinishReason.TOOL_CALLS else reason.value

    def _whole_calls(self, chunk: Chunk) -> Json:
        functions = [{"name": call.name, "arguments": call.arguments} for call in chunk.tool_calls]
        if self._calls.is_legacy:
            return {"function_call": functions[0]}
        calls = zip(chunk.tool_calls, functions, strict=True)
        return {"tool_calls": [{"id": call.id, "type": "function", "function": function} for call, function in calls]}

    def _call_deltas(self, chunk: Chunk) -> Json:
        """The first piece of a call has its id, its type and its name."""
        deltas: list[Json] = []
        for call in chunk.tool_calls:
            delta: Json = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.id:
                function = {"name": call.name, "arguments": call.arguments}
                delta = {"index": call.index, "id": call.id, "type": "function", "function": function}
            deltas.append(delta)
        if self._calls.is_legacy:
            return {"function_call": deltas[0]["function"]}
        return {"tool_calls": deltas}

    def _logprobs(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary) -> Json | None:
        if rendering.logprobs is None:
            return None
        return {"content": [_chat_logprob(one, vocabulary) for one in chunk.logprobs], "refusal": None}


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def finish_reason(self, reason: FinishReason) -> str:
        return reason.value

    def whole(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary) -> Json:
        return self.piece(chunk, rendering, vocabulary, is_first=True)

    def piece(self, chunk: Chunk, rendering: Rendering, vocabulary: Vocabulary, is_first: bool) -> Json:
        logprobs = None
        if rendering.logprobs is not None:
            logprobs = {
                "tokens": [vocabulary.token_text(one.token_id) for one in chunk.logprobs],
                "token_logprobs": [_finite(one.logprob) for one in chunk.logprobs],
                "top_logprobs": [_top_by_text(one, vocabulary) for one in chunk.logprobs],
                "text_offset": [one.text_offset for one in chunk.logprobs],
            }
        return {"text": chunk.text, "logprobs": logprobs}


class ResponseBuilder:
    """The answer to one call, of one prompt or several: choices are numbered prompt by prompt."""

    def __init__(
        self,
        form: Format,
        renderings: Sequence[Rendering],
        vocabulary: Vocabulary,
        created: int,
        cursor: Cursor | None = None,
    ) -> None:
        """`created` is in seconds since 1970. With a `cursor` events have ids, and continue from its position."""
        self._form = form
        self._renderings = renderings
        self._vocabulary = vocabulary
        self._cursor = cursor
        self._text_events: dict[int, TextEventTemplate] = {}  # of each choice that has begun
        self._head: Json = {
            "id": form.id_prefix + renderings[0].request_id,
            "object": form.object_name,
            "created": created,
            "model": renderings[0].model,
        }
        self._chunk_head = self._head | {"object": form.chunk_object_name}

    def whole(self, chunks: Sequence[tuple[int, Chunk]], usage: Usage) -> Json:
        """The whole answer, from all chunks with their prompt indices."""
        choices = []
        for prompt_index, rendering in enumerate(self._renderings):
            for chunk in completed_sequences([chunk for owner, chunk in chunks if owner == prompt_index], rendering):
                particular = self._form.whole(chunk, rendering, self._vocabulary)
                choices.append(self._choice(prompt_index, chunk, particular))
        return self._head | {"choices": choices, "usage": usage_json(usage)}

    def event(self, prompt_index: int, chunk: Chunk) -> bytes:
        """One event of a stream; empty where there is nothing to send yet."""
        if not chunk.has_output:
            return b""
        index = self._index(prompt_index, chunk)
        text_event = self._text_events.get(index)
        if text_event is None:
            self._text_events[index] = TextEventTemplate(
                self._piece(prompt_index, Chunk(chunk.index, 0, PLACEHOLDER), is_first=False)
            )
            is_first = self._cursor is None or not self._cursor.has_begun(index)
            event = sse_event(self._piece(prompt_index, chunk, is_first=is_first))
        elif chunk.logprobs or chunk.finish or chunk.reasoning or chunk.tool_calls:
            event = sse_event(self._piece(prompt_index, chunk, is_first=False))
        else:
            event = text_event.with_text(chunk.text)
        return event if self._cursor is None else self._cursor.advance(index, chunk) + event

    def last_events(self, usage: Usage | None) -> bytes:
        """The last events of a stream: its usage if requested, and [DONE]."""
        cursor = self._cursor
        events = b""
        if usage is not None and not (cursor and cursor.is_past_usage):
            events += cursor.advance_past_usage() if cursor else b""
            events += sse_event(self._chunk_head | {"choices": [], "usage": usage_json(usage)})
        if not (cursor and cursor.is_done):
            events += cursor.advance_to_end() if cursor else b""
            events += _DONE
        return events

    def _piece(self, prompt_index: int, chunk: Chunk, *, is_first: bool) -> Json:
        particular = self._form.piece(chunk, self._renderings[prompt_index], self._vocabulary, is_first)
        return self._chunk_head | {"choices": [self._choice(prompt_index, chunk, particular)]}

    def _choice(self, prompt_index: int, chunk: Chunk, particular: Mapping[str, Any]) -> Json:
        choice: Json = {"index": self._index(prompt_index, chunk), **particular, "finish_reason": None}
        if chunk.finish is not None:
            rendering = self._renderings[prompt_index]
            choice["finish_reason"] = self._form.finish_reason(chunk.finish.reason)
            # Beyond the OpenAI API: the stop match, as in vLLM, and the seed that repeats the samples.
            choice["stop_reason"] = _stop_reason(chunk.finish, rendering)
            choice["seed"] = rendering.seed
        return choice

    def _index(self, prompt_index: int, chunk: Chunk) -> int:
        return prompt_index * self._renderings[0].n + chunk.index


def usage_json(usage: Usage) -> Json:
    """Usage in the OpenAI API's format."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _stop_reason(finish: Finish, rendering: Rendering) -> str | int | None:
    """The client's own stop string or stop token that ended the choice."""
    if isinstance(finish.matched, int) and finish.matched not in rendering.stop_token_ids:
        return None
    return finish.matched


def _chat_logprob(logprob: TokenLogprob, vocabulary: Vocabulary) -> Json:
    sampled = _chat_token(logprob.token_id, logprob.logprob, vocabulary)
    sampled["top_logprobs"] = [_chat_token(token_id, value, vocabulary) for token_id, value in logprob.top]
    return sampled


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> Json:
    return {
        "token": vocabulary.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.piece(token_id)),
    }


def _top_by_text(logprob: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    """The top tokens and the sampled one, by their text; of equal texts the more probable one stays."""
    by_text: dict[str, float] = {}
    for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
        by_text.setdefault(vocabulary.token_text(token_id), _finite(value))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
