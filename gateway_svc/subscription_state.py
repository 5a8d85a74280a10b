"""The states of a subscription, and every legal transition between them."""

from collections.abc import Mapping
from enum import Enum

from svc_common.transitions import look_up


class SubscriptionState(Enum):
    """Where a request stands between its readers here and the scheduler of the current session."""

    IDLE = "idle"
    """No reader receives events, and no command is unanswered. Readers may wait for a session or for the model."""
    OPENING = "opening"
    """The command of the first waiting reader is unanswered. No reader receives events yet."""
    ATTACHED = "attached"
    """Readers receive events."""
    JOINING = "joining"
    """Readers receive events, and the command of the next waiting reader is unanswered."""
    DISCONNECTED = "disconnected"
    """There are readers and no session. An Attach is sent as soon as there is one."""
    ATTACHING = "attaching"
    """There are readers, and their Attach is unanswered."""
    UNKNOWN = "unknown"
    """There are readers, and the scheduler has no such request. It is submitted again as soon as its model is ready."""
    RESUBMITTING = "resubmitting"
    """There are readers, and the repeated Submit is unanswered."""
    CLOSED = "closed"
    """No reader is left, neither receiving nor waiting."""


class SubscriptionEvent(Enum):
    """What changes the state of a subscription."""

    JOIN_SENT = "join sent"
    """The Submit or Attach of a waiting reader was sent."""
    ATTACH_SENT = "attach sent"
    """An Attach for the readers was sent."""
    RESUBMIT_SENT = "resubmit sent"
    """The request was submitted again, with the tokens that its readers have."""
    ADMITTED = "admitted"
    """The unanswered command was answered with Accepted or Attached."""
    JOIN_DROPPED = "join dropped"
    """The waiting reader whose command is unanswered was refused, or left."""
    UNKNOWN_REQUEST = "unknown request"
    """The unanswered command was answered: there is no such request."""
    DIVERGED = "diverged"
    """The unanswered Attach began beyond what the scheduler has: all tokens have to be sent."""
    READERS_LEFT = "readers left"
    """The last reader that received events left or failed."""
    SESSION_LOST = "session lost"
    """The session ended, and with it the answer to any command."""
    CLOSE = "close"
    """The last waiting reader left too."""


_S, _E = SubscriptionState, SubscriptionEvent

TRANSITIONS: Mapping[tuple[SubscriptionState, SubscriptionEvent], SubscriptionState] = {
    (_S.IDLE, _E.JOIN_SENT): _S.OPENING,
    (_S.IDLE, _E.SESSION_LOST): _S.IDLE,
    (_S.IDLE, _E.CLOSE): _S.CLOSED,
    (_S.OPENING, _E.ADMITTED): _S.ATTACHED,
    (_S.OPENING, _E.JOIN_DROPPED): _S.IDLE,
    (_S.OPENING, _E.SESSION_LOST): _S.IDLE,
    (_S.ATTACHED, _E.JOIN_SENT): _S.JOINING,
    (_S.ATTACHED, _E.READERS_LEFT): _S.IDLE,
    (_S.ATTACHED, _E.SESSION_LOST): _S.DISCONNECTED,
    (_S.JOINING, _E.ADMITTED): _S.ATTACHED,
    (_S.JOINING, _E.JOIN_DROPPED): _S.ATTACHED,
    (_S.JOINING, _E.READERS_LEFT): _S.OPENING,
    (_S.JOINING, _E.SESSION_LOST): _S.DISCONNECTED,
    (_S.DISCONNECTED, _E.ATTACH_SENT): _S.ATTACHING,
    (_S.DISCONNECTED, _E.READERS_LEFT): _S.IDLE,
    (_S.ATTACHING, _E.ADMITTED): _S.ATTACHED,
    (_S.ATTACHING, _E.UNKNOWN_REQUEST): _S.UNKNOWN,
    (_S.ATTACHING, _E.DIVERGED): _S.DISCONNECTED,
    (_S.ATTACHING, _E.READERS_LEFT): _S.IDLE,
    (_S.ATTACHING, _E.SESSION_LOST): _S.DISCONNECTED,
    (_S.UNKNOWN, _E.RESUBMIT_SENT): _S.RESUBMITTING,
    (_S.UNKNOWN, _E.READERS_LEFT): _S.IDLE,
    (_S.UNKNOWN, _E.SESSION_LOST): _S.DISCONNECTED,
    (_S.RESUBMITTING, _E.ADMITTED): _S.ATTACHED,
    (_S.RESUBMITTING, _E.UNKNOWN_REQUEST): _S.UNKNOWN,
    (_S.RESUBMITTING, _E.READERS_LEFT): _S.IDLE,
    (_S.RESUBMITTING, _E.SESSION_LOST): _S.DISCONNECTED,
}


def next_state(state: SubscriptionState, event: SubscriptionEvent) -> SubscriptionState:
    """The state after an event. Raises IllegalTransition."""
    return look_up(TRANSITIONS, state, event)
