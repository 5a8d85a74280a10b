"""What goes to a worker and what comes of it, as frozen values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from scheduler_svc.core.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part of a step: compute tokens `start` to `start + num_tokens - 1`.

    Keys and values before `store_start` stand in shared blocks already and are not written. `draws` says that the
    step reaches the last known token, so that it draws the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    new_block_ids: list[int]
    store_start: int
    draws: bool


@dataclass(frozen=True, slots=True)
class Introduction:
    """A sequence that the worker does not know, with its tokens as they are now."""

    sequence: Sequence
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one replica: who leaves, who is new, and what is computed."""

    step_id: int
    departed_ids: list[int]
    introductions: list[Introduction]
    scheduled: list[Scheduled]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.num_tokens for part in self.scheduled)


class Drawn(Protocol):
    """A worker's result for one scheduled sequence."""

    @property
    def token_ids(self) -> Seq[int]:
        """The tokens drawn."""

    @property
    def logprobs(self) -> Seq[object]:
        """One for each token, where asked for. Not read here."""

    @property
    def failure(self) -> str | None:
        """What went wrong with this sequence alone, or None."""


@dataclass(frozen=True, slots=True)
class StopToken:
    """A sequence ended because it drew this token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """A sequence ended because it has all the tokens that were asked for."""


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """A sequence grew by `token_ids`, the first of which is output token number `offset`."""

    sequence: Sequence
    offset: int
    token_ids: Seq[int]
    logprobs: Seq[object] = field(default_factory=list)
    end: StopToken | MaxTokens | None = None


class Failure(Enum):
    """Why a request ended without all its tokens."""

    KEY_IN_USE = auto()
    DEADLINE_EXCEEDED = auto()
    CANCELLED = auto()
    INVALID = auto()
    UNAVAILABLE = auto()
    CONTEXT_LENGTH_EXCEEDED = auto()
    INTERNAL = auto()


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A request is over. `message` is for a person and holds no tokens."""

    request: Request
    reason: Failure
    message: str


Event = TokensEvent | FailedEvent
