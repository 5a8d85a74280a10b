"""The states of a live request by who receives its events, every legal transition between them, and how long a request
is kept in those without a gateway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from svc_common.transitions import look_up


class LiveState(Enum):
    """Whether a request runs, and whether gateways receive its events."""

    NEW = auto()
    """Not started: submitted, or read from the store."""
    TAKEN_OVER = auto()
    """Read by a new leader, and not started: its gateway may have given a client more tokens than the store has."""
    UNCLAIMED = auto()
    """Taken over, and no gateway attached in time. It has no name that a client could resume it by."""
    STARTED = auto()
    """In the core; its gateway is attached next."""
    ATTACHED = auto()
    """Runs; at least one gateway receives its events."""
    DETACHED = auto()
    """Runs without a gateway. Its client named it, and may resume it."""
    BROKEN = auto()
    """Runs without a gateway. It has no name, and the session of its last gateway broke: that one may reconnect."""
    ENDED = auto()
    """All its tokens are there, or it failed."""


class LiveEvent(Enum):
    """What changes the state."""

    TAKE_OVER = auto()
    EXPIRE = auto()
    """No gateway attached to an unnamed request within the grace after a takeover."""
    START = auto()
    ATTACH = auto()
    DETACH = auto()
    """The last gateway left, or none came, and the request is named."""
    BREAK = auto()
    """The session of the last gateway broke, and the request has no name."""
    END = auto()


@dataclass(frozen=True, slots=True)
class Graces:
    """How long a request is kept without a gateway, in seconds.

    `detached`: a named request. `broken`: an unnamed request whose session broke; its gateway may reconnect.
    `taken_over`: after a takeover, until the request runs. `unclaimed`: from a takeover until an unnamed request fails.
    """

    detached: float = 30.0
    broken: float = 5.0
    taken_over: float = 2.0
    unclaimed: float = 10.0


_S, _E = LiveState, LiveEvent

TRANSITIONS: Mapping[tuple[LiveState, LiveEvent], LiveState] = {
    (_S.NEW, _E.TAKE_OVER): _S.TAKEN_OVER,
    (_S.NEW, _E.START): _S.STARTED,
    (_S.NEW, _E.END): _S.ENDED,
    (_S.TAKEN_OVER, _E.EXPIRE): _S.UNCLAIMED,
    (_S.TAKEN_OVER, _E.START): _S.STARTED,
    (_S.TAKEN_OVER, _E.END): _S.ENDED,
    (_S.UNCLAIMED, _E.START): _S.STARTED,
    (_S.UNCLAIMED, _E.END): _S.ENDED,
    (_S.STARTED, _E.ATTACH): _S.ATTACHED,
    (_S.STARTED, _E.DETACH): _S.DETACHED,
    (_S.STARTED, _E.END): _S.ENDED,
    (_S.ATTACHED, _E.ATTACH): _S.ATTACHED,
    (_S.ATTACHED, _E.DETACH): _S.DETACHED,
    (_S.ATTACHED, _E.BREAK): _S.BROKEN,
    (_S.ATTACHED, _E.END): _S.ENDED,
    (_S.DETACHED, _E.ATTACH): _S.ATTACHED,
    (_S.DETACHED, _E.END): _S.ENDED,
    (_S.BROKEN, _E.ATTACH): _S.ATTACHED,
    (_S.BROKEN, _E.END): _S.ENDED,
    # A gateway has tokens beyond the end.
    (_S.ENDED, _E.START): _S.STARTED,
}


def next_state(state: LiveState, event: LiveEvent) -> LiveState:
    """The state after an event. Raises IllegalTransition."""
    return look_up(TRANSITIONS, state, event)
