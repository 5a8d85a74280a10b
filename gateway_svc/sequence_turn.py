"""The events of one answer, token by token. Those that are due after k tokens depend on these k tokens and the request
alone, as the text does."""

import hashlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway_svc.custom_inputs import CustomInputs
from gateway_svc.detokenizer import SequenceText
from gateway_svc.message_formats.events import (
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from gateway_svc.output import Chunk, ToolCallDelta
from gateway_svc.rendering import Rendering
from gateway_svc.turn_format import TurnFormat
from gateway_svc.vocabulary import Vocabulary

_ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class _Marker:
    """A marker that the parser has not had. `begin` and `end` are its place in the visible text."""

    literal: str
    begin: int
    end: int


class SequenceTurn:
    """Divides a sequence's text into events. Markers that are tokens keep their place in it, also while text before
    them is held back because it may become a stop string."""

    def __init__(
        self, text: SequenceText, turn: TurnFormat, index: int, vocabulary: Vocabulary, rendering: Rendering
    ) -> None:
        """`index` is that of the sequence."""
        self.is_calling = False
        """Whether calls are sent, and none of them was cut."""
        self.num_reasoning_tokens = 0
        """Tokens after the marker that begins reasoning, up to the token with which its end is known: of a marker of
        several tokens some count, and where text is held back that may become a stop string, some after it."""
        self._text = text
        self._hidden_ids = vocabulary.hidden_ids(rendering.special_tokens)
        markers = turn.control_markers(vocabulary.added)
        self._markers = {token_id: literal for literal, token_id in markers.items()}
        hidden = [literal for literal, token_id in markers.items() if token_id in self._hidden_ids]
        self._parser = turn.parser(markers, hidden)
        self._inputs = CustomInputs(tool.name for tool in turn.tools if tool.is_custom)
        self._max_calls = 1 if turn.has_one_call else sys.maxsize
        self._has_text = not turn.must_call
        self._id_base = f"{rendering.request_id}/{index}"
        self._coming: deque[_Marker] = deque()
        self._held = ""
        self._num_fed = 0

    def push(self, token_id: int, chunk: Chunk | None) -> None:
        """Reads a token, and adds what becomes due to the chunk, if there is one."""
        was_reasoning = self._parser.in_reasoning
        due = self._text.push(token_id)
        if (literal := self._markers.get(token_id)) is not None:
            end = self._text.num_chars
            self._coming.append(_Marker(literal, end - (0 if token_id in self._hidden_ids else len(literal)), end))
        self._add(self._feed(due), chunk)
        self.num_reasoning_tokens += was_reasoning and self._parser.in_reasoning

    def end(self, chunk: Chunk | None, last_token: int | None) -> None:
        """Adds what was held back, when no more tokens follow. `last_token` is the one that ended the sequence, if it
        was not pushed."""
        events = self._feed(self._text.flush())
        literal = "" if last_token is None else self._markers.get(last_token, "")
        self._add([*events, *self._parser.feed(self._held), *self._parser.end(literal)], chunk)

    def _feed(self, due: str) -> list[MessageEvent]:
        """The events of more text, up to a marker that is not due as a whole."""
        text = self._held + due
        num_fed = 0
        events: list[MessageEvent] = []
        while self._coming and self._coming[0].end <= self._num_fed + len(text):
            marker = self._coming.popleft()
            events += self._parser.feed(text[num_fed : marker.begin - self._num_fed])
            events += self._parser.feed(marker.literal, is_control=True)
            num_fed = marker.end - self._num_fed
        limit = len(text)
        if self._coming:
            limit = min(limit, self._coming[0].begin - self._num_fed)
        events += self._parser.feed(text[num_fed:limit])
        self._held = text[limit:]
        self._num_fed += limit
        return events

    def _add(self, events: Sequence[MessageEvent], chunk: Chunk | None) -> None:
        for event in self._inputs.read(events):
            match event:
                case ToolCallBegin():
                    self.is_calling = True
                # Only the last call may be cut, and the first one is always sent.
                case ToolCallEnd(index, is_cut=True) if index < self._max_calls:
                    self.is_calling = False
            if chunk is None:
                continue
            match event:
                case TextDelta(text, end):
                    if self._has_text:
                        chunk.text += text
                        chunk.text_tokens += self._text.tokens_between(end - len(text), end)
                case ReasoningDelta(text):
                    chunk.reasoning += text
                case ToolCallBegin(index) | ToolArgumentsDelta(index) if index >= self._max_calls:
                    pass
                case ToolCallBegin(index, name):
                    call_id, is_custom = self._call_id(index), self._inputs.is_reading
                    chunk.tool_calls.append(ToolCallDelta(index, "", call_id, name, is_custom))
                case ToolCallEnd(index) if index < self._max_calls:
                    chunk.ended_calls += (index,)
                case ToolArgumentsDelta(index, fragment):
                    if not chunk.tool_calls or chunk.tool_calls[-1].index != index:
                        chunk.tool_calls.append(ToolCallDelta(index, is_custom=self._inputs.is_reading))
                    chunk.tool_calls[-1].arguments += fragment

    def _call_id(self, index: int) -> str:
        """The same on every gateway, so that a resumed stream has it again."""
        return f"call_{hashlib.sha256(f'{self._id_base}/{index}'.encode()).hexdigest()[:_ID_LENGTH]}"


class TextTurn:
    """The turn of a sequence whose whole output is text, in the place of a `SequenceTurn`."""

    is_calling = False
    num_reasoning_tokens = 0

    def __init__(self, text: SequenceText) -> None:
        self._text = text
        self._num_due = 0  # characters, where places are kept

    def push(self, token_id: int, chunk: Chunk | None) -> None:
        self._add(self._text.push(token_id), chunk)

    def end(self, chunk: Chunk | None, last_token: int | None) -> None:
        self._add(self._text.flush(), chunk)

    def _add(self, text: str, chunk: Chunk | None) -> None:
        if chunk is not None:
            chunk.text += text
        if self._text.keeps_places:
            begin, self._num_due = self._num_due, self._num_due + len(text)
            if chunk is not None:
                chunk.text_tokens += self._text.tokens_between(begin, self._num_due)


def sequence_turn(
    text: SequenceText, index: int, vocabulary: Vocabulary, rendering: Rendering
) -> SequenceTurn | TextTurn:
    """The turn of a sequence."""
    if rendering.turn is None:
        return TextTurn(text)
    return SequenceTurn(text, rendering.turn, index, vocabulary, rendering)
