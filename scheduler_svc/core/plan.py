"""What goes to a worker and what comes of it, as frozen values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from scheduler_svc.core.sequence import Request, Sequence


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step: compute tokens `start` to `start + num_tokens - 1`.

    The KV of tokens before `num_cached_tokens` is in shared blocks already and is not written again. `samples`: the
    step computes the last known token, so the worker samples the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    new_block_ids: list[int]
    num_cached_tokens: int
    samples: bool
    max_extra_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NewSequence:
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
class BlockTableUpdate:
    """Place `index` of a sequence's block table is another block from now on, which holds the same."""

    sequence_id: int
    index: int
    block_id: int


BlockHash = tuple[int, bytes]
"""A block, and the hash of what it holds: of its tokens and of all before them."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one replica, executed in this order: finished sequences, swaps and copies, new sequences, forward
    pass.

    `block_hashes` and `host_block_hashes` are the contents of device and host blocks before the step writes any of
    them. `held_block_ids` are released when the step commits. `preempted` are the sequences preempted since the last
    step.
    """

    step_id: int
    finished_ids: list[int]
    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    swap_out: list[BlockPair] = field(default_factory=list)
    swap_in: list[BlockPair] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    block_table_updates: list[BlockTableUpdate] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    host_block_hashes: list[BlockHash] = field(default_factory=list)
    held_block_ids: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.num_tokens for part in self.scheduled)


class SampledSequence(Protocol):
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
class SwapDone:
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

    results: Seq[SampledSequence]
    swaps: Seq[SwapDone] = ()
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
