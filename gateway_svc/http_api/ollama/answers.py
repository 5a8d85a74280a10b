"""Answers in Ollama's format: whole, and as lines of a stream."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from gateway_svc.http_api.call_arguments import arguments_of
from gateway_svc.http_api.calls import InputValues
from gateway_svc.http_api.events import json_line
from gateway_svc.http_api.openai.choice_formats import chat_logprob
from gateway_svc.output import Chunk, FinishReason, ToolCallDelta, Usage, merge_calls, merge_chunks
from gateway_svc.rendering import Rendering
from gateway_svc.vocabulary import Vocabulary

Json = dict[str, Any]


class OllamaForm(Enum):
    """Which answer it is: of /api/chat, or of /api/generate."""

    CHAT = "chat"
    GENERATE = "generate"

    def output(self, text: str, reasoning: str = "", calls: Sequence[Json] = (), logprobs: Sequence[Json] = ()) -> Json:
        """Its fields with output."""
        return self._output(text, reasoning, calls) | ({"logprobs": list(logprobs)} if logprobs else {})

    def _output(self, text: str, reasoning: str, calls: Sequence[Json]) -> Json:
        thinking = {"thinking": reasoning} if reasoning else {}
        if self is OllamaForm.GENERATE:
            return {"response": text, **thinking}
        message: Json = {"role": "assistant", "content": text, **thinking}
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}

    def loaded(self, model: str) -> Json:
        """The answer to a body without a prompt."""
        return {"model": model, "created_at": now(), **self.output(""), "done": True, "done_reason": "load"}


class OllamaBuilder:
    """The answer to one request. `usage` returns the tokens so far; `arrival_time` is on the monotonic clock, in
    seconds."""

    def __init__(
        self,
        form: OllamaForm,
        rendering: Rendering,
        vocabulary: Vocabulary,
        usage: Callable[[], Usage],
        arrival_time: float,
    ) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self._model = rendering.model
        self._usage = usage
        self._arrival_time = arrival_time
        self._first_output_time: float | None = None
        self._end_time: float | None = None
        self._calls: list[ToolCallDelta] = []  # pieces of calls that are not sent yet
        self._reason: FinishReason | None = None

    def begin(self) -> None:
        """Notes the time of the first output."""
        if self._first_output_time is None:
            self._first_output_time = time.monotonic()

    def end(self) -> None:
        """Notes the time of the end of the output. The answer may be made later, when a thread is free."""
        self._end_time = time.monotonic()

    def whole(self, chunks: Sequence[Chunk]) -> Json:
        """The whole answer, from all chunks."""
        (chunk,) = merge_chunks(chunks)
        self._reason = chunk.finish.reason if chunk.finish else None
        calls = [_call_json(call) for call in chunk.tool_calls]
        return self._line(self._form.output(chunk.text, chunk.reasoning, calls, self._logprobs(chunk))) | self._end()

    def lines(self, chunk: Chunk) -> bytes:
        """The lines of one chunk. A call is sent when it is complete."""
        self.begin()
        if chunk.finish is not None:
            self._reason = chunk.finish.reason
        self._calls += chunk.tool_calls
        done = self._pop_calls(chunk.ended_calls) if chunk.ended_calls else []
        logprobs = self._logprobs(chunk)
        if not (chunk.text or chunk.reasoning or done or logprobs):
            return b""
        return json_line(self._line(self._form.output(chunk.text, chunk.reasoning, done, logprobs)))

    def last_lines(self) -> bytes:
        """The end."""
        return json_line(self._line(self._form.output("")) | self._end())

    def _logprobs(self, chunk: Chunk) -> list[Json]:
        """Those of its tokens, as chats have them; the top ones only where some were asked for."""
        tokens = [chat_logprob(one, self._vocabulary) for one in chunk.logprobs]
        return [{name: value for name, value in one.items() if name != "top_logprobs" or value} for one in tokens]

    def _pop_calls(self, indices: Sequence[int]) -> list[Json]:
        """The calls with these indices."""
        done = [piece for piece in self._calls if piece.index in indices]
        self._calls = [piece for piece in self._calls if piece.index not in indices]
        return [_call_json(call) for call in merge_calls(done)]

    def _line(self, output: Json) -> Json:
        return {"model": self._model, "created_at": now(), **output, "done": False}

    def _end(self) -> Json:
        usage, end = self._usage(), self._end_time or time.monotonic()
        first = end if self._first_output_time is None else self._first_output_time
        return {
            "done": True,
            "done_reason": "length" if self._reason is FinishReason.LENGTH else "stop",
            "total_duration": _ns(end - self._arrival_time),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first - self._arrival_time),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(end - first),
        }


def embed_answer(embedded: InputValues, seconds: float) -> Json:
    """The answer of /api/embed, whose vectors took so long."""
    return {
        "model": embedded.model,
        "embeddings": [vector.tolist() for vector in embedded.values],
        "total_duration": _ns(seconds),
        "load_duration": 0,
        "prompt_eval_count": embedded.usage.prompt_tokens,
    }


def now() -> str:
    """The time in UTC, as RFC 3339 has it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call_json(call: ToolCallDelta) -> Json:
    function = {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)}
    return {"id": call.id, "function": function}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
