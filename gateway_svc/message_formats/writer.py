"""Collects the events of a turn. White space between text and markers belongs to neither."""

from collections.abc import Callable

from gateway_svc.message_formats.events import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    join_events,
)
from gateway_svc.message_formats.source import TurnSource

_SPACE = " \t\r\n"


class EventWriter:
    """The events since the last call of take(). Text and reasoning are what `source` has rejected last."""

    def __init__(self, source: TurnSource) -> None:
        self._events: list[MessageEvent] = []
        self._text = _Prose(lambda text, after: TextDelta(text, source.num_chars - after), self._events)
        self._reasoning = _Prose(lambda text, _: ReasoningDelta(text), self._events)
        self._num_calls = 0
        self.in_call = False
        """Whether a call has begun and not ended."""
        self.in_reasoning = False
        """Whether what comes next is reasoning, or ends it."""
        self.in_header = False
        """Whether the header of a message has begun and not ended."""

    def take(self) -> list[MessageEvent]:
        """The events since the previous call, with adjacent deltas joined."""
        events = join_events(self._events, keeps_places=True)
        self._events.clear()
        return events

    def write_text(self, text: str) -> None:
        self._text.write(text)

    def write_reasoning(self, text: str) -> None:
        self._reasoning.write(text)

    def add_marker(self) -> None:
        self._text.add_marker()
        self._reasoning.add_marker()

    def end_message(self) -> None:
        """A message of the turn has ended. Text after it begins on a line of its own, and so does reasoning."""
        self.add_marker()
        self._text.divide()
        self._reasoning.divide()

    def begin_call(self, name: str) -> None:
        self.add_marker()
        self._events.append(ToolCallBegin(self._num_calls, name))
        self.in_call = True

    def write_arguments(self, fragment: str) -> None:
        """More of the arguments of the call that has begun."""
        self._events.append(ToolArgumentsDelta(self._num_calls, fragment))

    def end_call(self, *, is_cut: bool = False) -> None:
        self._events.append(ToolCallEnd(self._num_calls, is_cut))
        self._num_calls += 1
        self.in_call = False

    def end(self) -> None:
        """The turn has ended: white space that was held back is text, except after a marker."""
        if self.in_call:
            self.end_call(is_cut=True)
        self._text.flush()
        self._reasoning.flush()


class _Prose:
    """Text or reasoning. White space is held back until more of it follows.

    White space before a marker is left out, and after one if there was no text before. So two parts that calls divide
    are joined by the white space after the calls.
    """

    def __init__(self, event: Callable[[str, int], MessageEvent], events: list[MessageEvent]) -> None:
        """`event` makes one of a text that so many characters follow."""
        self._event = event
        self._events = events
        self._space: list[str] = []
        self._has_begun = False
        self._is_after_marker = False
        self._divider: MessageEvent | None = None

    def write(self, text: str) -> None:
        body = text.rstrip(_SPACE)
        space = text[len(body) :]
        if body:
            body = "".join((*self._space, body))
            if self._is_after_marker and (self._divider is not None or not self._has_begun):
                body = body.lstrip(_SPACE)
            if self._divider is not None:
                self._events.append(self._divider)
                self._divider = None
            self._events.append(self._event(body, len(space)))
            self._space.clear()
            self._has_begun = True
            self._is_after_marker = False
        if space:
            self._space.append(space)

    def add_marker(self) -> None:
        self._space.clear()
        self._is_after_marker = True

    def divide(self) -> None:
        if self._has_begun and self._divider is None:
            self._divider = self._event("\n", 0)

    def flush(self) -> None:
        if self._space and not self._is_after_marker:
            self._events.append(self._event("".join(self._space), 0))
        self._space.clear()
