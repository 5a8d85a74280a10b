"""Answers in Anthropic's format: whole, and as events of a stream."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from gateway_svc.http_api.call_arguments import arguments_of
from gateway_svc.http_api.events import PLACEHOLDER, TextEventTemplate, named_event
from gateway_svc.output import Chunk, Finish, FinishReason, ToolCallDelta, Usage
from gateway_svc.ranking import completed_sequences
from gateway_svc.rendering import Rendering

Json = dict[str, Any]


class _Kind(Enum):
    """Kinds of blocks."""

    THINKING = "thinking"
    TEXT = "text"
    TOOL_USE = "tool_use"


class MessageBuilder:
    """The answer to one request. `usage` returns the tokens so far."""

    def __init__(self, rendering: Rendering, usage: Callable[[], Usage]) -> None:
        self._rendering = rendering
        self._usage = usage
        self._has_begun = False
        self._open: tuple[_Kind, int] | None = None  # the open block's kind, and of a call its index
        self._num_blocks = 0
        self._text_event: TextEventTemplate | None = None  # of the open block of text
        self._finish: Finish | None = None

    def whole(self, chunks: Sequence[tuple[int, Chunk]]) -> Json:
        """The whole answer, from all chunks."""
        (chunk,) = completed_sequences([chunk for _, chunk in chunks], self._rendering)
        blocks: list[Json] = []
        if chunk.reasoning:
            blocks.append({"type": "thinking", "thinking": chunk.reasoning, "signature": ""})
        if chunk.text:
            blocks.append({"type": "text", "text": chunk.text})
        blocks += [_call_block(call, arguments_of(call.arguments)) for call in chunk.tool_calls]
        return self._message(blocks) | _end(chunk.finish)

    def event(self, _: int, chunk: Chunk) -> bytes:
        """The events of one chunk. The first one begins the message."""
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            message = self._message([]) | _end(None)
            events.append(named_event("message_start", {"type": "message_start", "message": message}))
        open_block = self._open
        of_open = [call for call in chunk.tool_calls if (_Kind.TOOL_USE, call.index) == open_block]
        others = [call for call in chunk.tool_calls if (_Kind.TOOL_USE, call.index) != open_block]
        for call in of_open:  # before anything else, which would end its block
            events += self._call(call)
        if chunk.reasoning:
            events += self._thinking(chunk.reasoning)
        if chunk.text:
            events += self._text(chunk.text)
        for call in others:
            events += self._call(call)
        self._finish = chunk.finish or self._finish
        return b"".join(events)

    def last_events(self) -> bytes:
        """The end of the last block and of the message."""
        end = {"type": "message_delta", "delta": _end(self._finish), "usage": usage_json(self._usage())}
        last = [named_event("message_delta", end), named_event("message_stop", {"type": "message_stop"})]
        return b"".join([*self._close(), *last])

    def _thinking(self, text: str) -> list[bytes]:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        events = self._enter(_Kind.THINKING, 0, block)
        return [*events, self._delta({"type": "thinking_delta", "thinking": text})]

    def _text(self, text: str) -> list[bytes]:
        events = self._enter(_Kind.TEXT, 0, {"type": "text", "text": ""})
        if self._text_event is None:
            body = self._delta_json({"type": "text_delta", "text": PLACEHOLDER})
            self._text_event = TextEventTemplate(body, "content_block_delta")
        return [*events, self._text_event.with_text(text)]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        events = self._enter(_Kind.TOOL_USE, call.index, _call_block(call, {}))
        if call.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _enter(self, kind: _Kind, call_index: int, block: Json) -> list[bytes]:
        """The events that begin a block, unless it is open."""
        if self._open == (kind, call_index):
            return []
        events = self._close()
        self._open = kind, call_index
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return [*events, named_event("content_block_start", start)]

    def _close(self) -> list[bytes]:
        """The event that ends the open block, if there is one."""
        if self._open is None:
            return []
        stop = {"type": "content_block_stop", "index": self._num_blocks}
        self._open, self._text_event = None, None
        self._num_blocks += 1
        return [named_event("content_block_stop", stop)]

    def _delta(self, delta: Json) -> bytes:
        return named_event("content_block_delta", self._delta_json(delta))

    def _delta_json(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _message(self, blocks: list[Json]) -> Json:
        return {
            "id": f"msg_{self._rendering.request_id}",
            "type": "message",
            "role": "assistant",
            "content": blocks,
            "model": self._rendering.model,
            "usage": usage_json(self._usage()),
        }


def usage_json(usage: Usage) -> Json:
    """Usage in Anthropic's format, where input_tokens leaves out tokens from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _call_block(call: ToolCallDelta, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _end(finish: Finish | None) -> Json:
    """Why the answer ended, as far as it is known."""
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    match finish.reason:
        case FinishReason.LENGTH:
            reason = "max_tokens"
        case FinishReason.TOOL_CALLS:
            reason = "tool_use"
        case FinishReason.STOP:
            reason = "stop_sequence" if isinstance(finish.matched, str) else "end_turn"
    sequence = finish.matched if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}
