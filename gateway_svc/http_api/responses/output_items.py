"""Output items of a response, and the events of a stream that build them: a function of the output's tokens."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_svc.http_api.openai.choice_formats import chat_logprob
from gateway_svc.http_api.responses.namespaces import Namespaces
from gateway_svc.output import Chunk, FinishReason, TokenLogprob, ToolCallDelta
from gateway_svc.vocabulary import Vocabulary

Json = dict[str, Any]

_ID_LENGTH = 48


def item_id(prefix: str, response_id: str, place: str) -> str:
    """The id of an item of a response, the same at every gateway."""
    return f"{prefix}_{hashlib.sha256(f'{response_id}/{place}'.encode()).hexdigest()[:_ID_LENGTH]}"


class OutputItems:
    """The items so far. At most the last one is not complete.

    Events are without their sequence numbers. Items in events are not changed later.
    """

    def __init__(
        self,
        response_id: str,
        vocabulary: Vocabulary,
        namespaces: Namespaces,
        *,
        has_logprobs: bool,
        hides_reasoning: bool = False,
    ) -> None:
        self._response_id = response_id
        self._namespaces = namespaces
        self._vocabulary = vocabulary
        self._has_logprobs = has_logprobs
        self._hides_reasoning = hides_reasoning
        self._items: list[Json] = []
        self._open: _OpenItem | None = None
        self._call_index = -1
        self._unsent_logprobs: dict[int, TokenLogprob] = {}  # of tokens that may still become text, by their places

    @property
    def snapshot(self) -> list[Json]:
        """The items so far."""
        return self._items if self._open is None else [*self._items, self._open.item("in_progress")]

    def interrupted(self) -> list[Json]:
        """The items of a response that has failed or was cancelled."""
        return self._items if self._open is None else [*self._items, self._open.item("incomplete")]

    def add(self, chunk: Chunk) -> list[Json]:
        """The events of one token, or of the end."""
        events: list[Json] = []
        for call in chunk.tool_calls:  # more of the call that is open comes before anything else
            if call.index == self._call_index and not call.id:
                events += self._add_arguments(call)
        if chunk.reasoning and not self._hides_reasoning:
            events += self._add_text(_Reasoning, chunk.reasoning, [])
        if self._has_logprobs:
            self._unsent_logprobs |= enumerate(chunk.logprobs, chunk.offset)
        if chunk.text:
            events += self._add_text(_Message, chunk.text, self._pop_logprobs(chunk.text_tokens))
        for call in chunk.tool_calls:
            if call.id:
                self._call_index = call.index
                events += self._close("completed")
                events += self._begin(self._new_call(call))
                events += self._add_arguments(call)
            elif call.index != self._call_index:
                raise ValueError("a piece of a call that is not the latest")
        if chunk.finish is not None:
            events += self._end(chunk.finish.reason)
        return events

    def _end(self, reason: FinishReason) -> list[Json]:
        events: list[Json] = []
        if not self._items and self._open is None:  # clients expect a message
            events += self._begin(_Message(self._next_id("msg")))
        return events + self._close("incomplete" if reason is FinishReason.LENGTH else "completed")

    def _pop_logprobs(self, tokens: Sequence[int]) -> list[Json]:
        """Those of tokens whose text is due. None of the tokens before them becomes text later."""
        if not self._has_logprobs or not tokens:
            return []
        found = [chat_logprob(self._unsent_logprobs[token], self._vocabulary) for token in tokens]
        for token in [token for token in self._unsent_logprobs if token <= tokens[-1]]:
            del self._unsent_logprobs[token]
        return found

    def _add_text(self, kind: "type[_Message | _Reasoning]", delta: str, logprobs: list[Json]) -> list[Json]:
        events: list[Json] = []
        if not isinstance(self._open, kind):
            events += [*self._close("completed"), *self._begin(kind(self._next_id(kind.prefix)))]
        assert isinstance(self._open, _Message | _Reasoning)
        return [*events, self._placed(self._open.add(delta, logprobs))]

    def _add_arguments(self, call: ToolCallDelta) -> list[Json]:
        assert isinstance(self._open, _Call)
        return [self._placed(self._open.add(call.arguments))] if call.arguments else []

    def _new_call(self, call: ToolCallDelta) -> "_Call":
        if call.is_custom:
            return _CustomCall(self._next_id("ctc"), call.id, {"name": call.name})
        return _FunctionCall(self._next_id("fc"), call.id, self._namespaces.fields(call.name))

    def _begin(self, item: "_OpenItem") -> list[Json]:
        self._open = item
        added = {"type": "response.output_item.added", "item": item.item("in_progress")}
        return [self._placed(event) for event in (added, *item.begin())]

    def _close(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        done = {"type": "response.output_item.done", "item": self._open.item(status)}
        events = [self._placed(event) for event in (*self._open.end(), done)]
        self._items = [*self._items, done["item"]]  # type: ignore[list-item]
        self._open = None
        return events

    def _placed(self, event: Json) -> Json:
        event["output_index"] = len(self._items)
        return event

    def _next_id(self, prefix: str) -> str:
        return item_id(prefix, self._response_id, f"output/{len(self._items)}")


class _TextItem(ABC):
    """An item with one part of text."""

    prefix: str
    part_type: str
    event: str

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._deltas: list[str] = []
        self._logprobs: list[Json] = []

    @abstractmethod
    def part(self) -> Json: ...

    @abstractmethod
    def item(self, status: str) -> Json: ...

    def begin(self) -> Sequence[Json]:
        return [self._about_part("response.content_part.added", part=self.part())]

    def add(self, delta: str, logprobs: list[Json]) -> Json:
        self._deltas.append(delta)
        self._logprobs += logprobs
        return self._about_part(f"{self.event}.delta", delta=delta, **self._event_logprobs(logprobs))

    def end(self) -> Sequence[Json]:
        text = self._about_part(f"{self.event}.done", text=self.text, **self._event_logprobs(self._logprobs))
        return [text, self._about_part("response.content_part.done", part=self.part())]

    @property
    def text(self) -> str:
        return "".join(self._deltas)

    def _event_logprobs(self, logprobs: list[Json]) -> Json:
        return {}

    def _about_part(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, "content_index": 0, **fields}


class _Message(_TextItem):
    prefix = "msg"
    event = "response.output_text"

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def item(self, status: str) -> Json:
        content = [self.part()] if self._deltas or status != "in_progress" else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event_logprobs(self, logprobs: list[Json]) -> Json:
        return {"logprobs": list(logprobs)}


class _Reasoning(_TextItem):
    prefix = "rs"
    event = "response.reasoning_text"

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str) -> Json:
        content = [self.part()] if self._deltas else []
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


class _Call(ABC):
    """A call, and what the tool takes: arguments, or a text."""

    item_type: str
    field: str
    event: str

    def __init__(self, item_id: str, call_id: str, names: Mapping[str, str]) -> None:
        """`names` are the fields that name the tool."""
        self.id = item_id
        self._call_id = call_id
        self._names = names
        self._deltas: list[str] = []

    def item(self, status: str) -> Json:
        head = {"id": self.id, "type": self.item_type, "call_id": self._call_id, **self._names}
        return {**head, self.field: "".join(self._deltas), "status": status}

    def begin(self) -> Sequence[Json]:
        return ()

    def add(self, delta: str) -> Json:
        self._deltas.append(delta)
        return {"type": f"{self.event}.delta", "item_id": self.id, "delta": delta}

    def end(self) -> Sequence[Json]:
        return [{"type": f"{self.event}.done", "item_id": self.id, **self._done(), self.field: "".join(self._deltas)}]

    @abstractmethod
    def _done(self) -> Json:
        """Further fields of the last event."""


class _FunctionCall(_Call):
    item_type = "function_call"
    field = "arguments"
    event = "response.function_call_arguments"

    def _done(self) -> Json:
        return {"name": self._names["name"]}


class _CustomCall(_Call):
    item_type = "custom_tool_call"
    field = "input"
    event = "response.custom_tool_call_input"

    def _done(self) -> Json:
        return {}


_OpenItem = _Message | _Reasoning | _Call
