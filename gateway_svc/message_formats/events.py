"""What an assistant's turn consists of, as events in the order of the output."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text for the user. `end` is where it ends in the visible characters of the output."""

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call begins. `index` counts the calls of a turn from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the arguments. The fragments of a complete call, joined, are the text of a JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """No more arguments follow. Each call that began ends. `is_cut`: the output ended within the arguments."""

    index: int
    is_cut: bool = False


MessageEvent = ReasoningDelta | TextDelta | ToolCallBegin | ToolArgumentsDelta | ToolCallEnd


def join_events(events: Iterable[MessageEvent], *, keeps_places: bool = False) -> list[MessageEvent]:
    """The same events with adjacent deltas of one kind, and of one call, as one; with `keeps_places` not those of text
    between which the output has something else."""
    joined: list[MessageEvent] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case ReasoningDelta(before), ReasoningDelta(text):
                joined[-1] = ReasoningDelta(before + text)
            case TextDelta(before, place), TextDelta(text, end) if not keeps_places or end - len(text) == place:
                joined[-1] = TextDelta(before + text, end)
            case ToolArgumentsDelta(index, before), ToolArgumentsDelta(_, fragment):
                # Calls do not interleave.
                joined[-1] = ToolArgumentsDelta(index, before + fragment)
            case _:
                joined.append(event)
    return joined
