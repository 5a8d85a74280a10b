"""Positions in a stream of server-sent events: the ids of its events, from which a client resumes."""

import re
from collections.abc import Mapping, Sequence
from enum import Enum

from gateway_svc.output import Chunk
from gateway_svc.resume_position import EndDelivery, ResumePosition
from svc_common.errors import QuireError, Reason

LAST_EVENT_ID = "last-event-id"
MAX_CHOICES = 128
"""Of a stream whose events have ids: each id has a position for each choice."""

# The number of tokens sent of each choice, with an "e" where its end was sent, or "0r" where only its role was; then
# what follows all choices.
_CURSOR = re.compile(r"((?:0r|[0-9]{1,9}e?)(?:-(?:0r|[0-9]{1,9}e?))*)(-usage|-done)?")


class _CursorStage(Enum):
    CHOICES = ""
    USAGE = "-usage"
    DONE = "-done"


class Cursor:
    """A position in the stream of an answer. Each event that is sent moves it."""

    def __init__(self, num_choices: int) -> None:
        """The beginning of a stream."""
        self._choices = ["0"] * num_choices
        self._stage = _CursorStage.CHOICES

    @classmethod
    def parse(cls, text: str, num_choices: int) -> "Cursor":
        """The position after the event with this id. Raises QuireError where no event of such a stream has it."""
        match = _CURSOR.fullmatch(text)
        choices = match[1].split("-") if match else []
        if match is None or len(choices) != num_choices:
            message = "is not the id of an event of this stream"
            raise QuireError(Reason.INVALID_FIELD, message, field=LAST_EVENT_ID)
        cursor = cls(num_choices)
        cursor._choices = choices
        cursor._stage = _CursorStage(match[2] or "")
        return cursor

    @property
    def is_past_usage(self) -> bool:
        """Whether the usage was sent."""
        return self._stage is not _CursorStage.CHOICES

    @property
    def is_done(self) -> bool:
        """Whether everything was sent."""
        return self._stage is _CursorStage.DONE

    def has_begun(self, choice: int) -> bool:
        """Whether any part of a choice was sent."""
        return self._choices[choice] != "0"

    def resume_positions(self, n: int) -> Sequence[Mapping[int, ResumePosition]]:
        """The client's position in each choice, prompt by prompt, with `n` choices each."""
        resume_positions = [_resume_position(choice) for choice in self._choices]
        return [dict(enumerate(resume_positions[first : first + n])) for first in range(0, len(resume_positions), n)]

    def open(self, choice: int) -> bytes:
        """Moves after the event with the role of a choice; returns the line with the event's id."""
        self._choices[choice] = "0r"
        return self._line()

    def advance(self, choice: int, chunk: Chunk) -> bytes:
        """Moves after an event with a chunk of a choice; returns the line with the event's id."""
        end = "" if chunk.finish is None else "e"
        self._choices[choice] = f"{chunk.offset + len(chunk.token_ids)}{end}"
        return self._line()

    def advance_past_usage(self) -> bytes:
        """Moves after the usage."""
        self._stage = _CursorStage.USAGE
        return self._line()

    def advance_to_end(self) -> bytes:
        """Moves after the last event."""
        self._stage = _CursorStage.DONE
        return self._line()

    def _line(self) -> bytes:
        return f"id: {'-'.join(self._choices)}{self._stage.value}\n".encode()


def _resume_position(choice: str) -> ResumePosition:
    ending = EndDelivery.GIVEN if choice.endswith("e") else EndDelivery.MISSING
    return ResumePosition(int(choice.rstrip("er")), ending, LAST_EVENT_ID)
