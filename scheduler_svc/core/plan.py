"""What goes to a worker and what comes of it, as frozen values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from scheduler_svc.core.sequence import Request, Sequence


class Scheduled(NamedTuple):
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


class Direction(Enum):
    """Where blocks go."""

    OUT = auto()  # from the device to its host
    IN = auto()


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block on the device and one on the host."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block that is copied to another one of the device."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class TableChange:
    """Place `index` of a sequence's block table is another block from now on, which holds the same."""

    sequence_id: int
    index: int
    block_id: int


Label = tuple[int, bytes]
"""A block, and the hash of what it holds: of its tokens and of all before them."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one replica: who leaves, what is copied, who is new, and what is computed. In this order.

    `labels` and `host_labels` say of blocks of the device, and of the host, what they hold before the step writes any.
    `held_ids` are blocks that this step names and that are to be let go once it is committed; `preempted` are those who
    gave way since the step before.
    """

    step_id: int
    departed_ids: list[int]
    introductions: list[Introduction]
    scheduled: list[Scheduled]
    swap_out: list[BlockPair] = field(default_factory=list)
    swap_in: list[BlockPair] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    table_changes: list[TableChange] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    host_labels: list[Label] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

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
class TransferDone:
    """All blocks that one step moved in one direction are there, or `failure` says why they are not."""

    step_id: int
    direction: Direction
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a worker answers to a step: results in the order of `StepPlan.scheduled`, and transfers that are over.

    `busy_seconds` is the time that the device took for it, where the worker tells.
    """

    results: Seq[Drawn]
    transfers: Seq[TransferDone] = ()
    busy_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StopToken:
    """A sequence ended because it drew this token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """A sequence ended because it has all the tokens that were asked for."""


class TokensEvent(NamedTuple):
    """A sequence grew by `token_ids`, the first of which is output token number `offset`. `score` is of a search."""

    sequence: Sequence
    offset: int
    token_ids: Seq[int]
    logprobs: Seq[object] = ()
    end: StopToken | MaxTokens | None = None
    score: float | None = None


class Failure(Enum):
    """Why a request ended without all its tokens."""

    KEY_IN_USE = auto()
    DEADLINE_EXCEEDED = auto()
    CANCELLED = auto()
    INVALID = auto()
    SEARCH_TOO_WIDE = auto()
    TOO_MANY_TOKENS = auto()
    UNAVAILABLE = auto()
    TENANT_OVER_QUOTA = auto()
    DEADLINE_INFEASIBLE = auto()
    CONTEXT_LENGTH_EXCEEDED = auto()
    INTERNAL = auto()
    QUARANTINED = auto()
    UNKNOWN_REQUEST = auto()
    STORE_DEGRADED = auto()
    DIVERGED = auto()


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A request is over. `message` is for a person and holds no tokens; `retry_after` is in seconds."""

    request: Request
    reason: Failure
    message: str
    retry_after: float | None = None


Event = TokensEvent | FailedEvent
