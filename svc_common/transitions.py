"""State machines as tables: the next state by the current one and an event."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

_State = TypeVar("_State", bound=Enum)
_Event = TypeVar("_Event", bound=Enum)


class IllegalTransition(Exception):  # noqa: N818
    """An event that the state does not allow: a bug."""


def look_up(transitions: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """The state after an event. Raises IllegalTransition for a pair that the table does not have."""
    after = transitions.get((state, event))
    if after is None:
        raise IllegalTransition(f"{state!r} does not allow {event!r}")
    return after
