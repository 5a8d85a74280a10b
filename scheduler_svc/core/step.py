"""A step: what is sent to a worker, and what it returns, as frozen values."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from scheduler_svc.core.request import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step: compute tokens `start` to `start + num_tokens - 1`.

    The KV of tokens before `num_cached_tokens` is in the sequence's blocks already and is not written again. If it
    `samples`, the step computes the last known token, and the worker samples the next one, or returns the prompt's
    value; with speculation it may return up to `max_extra_tokens` tokens more.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    new_block_ids: list[int]
    num_cached_tokens: int
    samples: bool
    max_extra_tokens: int = 0

    def settle(self, num_returned: int) -> None:
        """The step is done, or lost: of the tokens that were promised, its account pays for those that it returned."""
        charge = self.sequence.charge
        if charge is not None and self.samples and not charge.pays_ahead:
            charge.settle(1 + self.max_extra_tokens, num_returned)


def first_block(part: ScheduledSequence) -> int:
    """The first block of its sequence's table; -1 if there is none."""
    return part.sequence.block_ids[0] if part.sequence.block_ids else -1


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker does not know, with its known tokens.

    With `needs_prompt_logprobs`, each step that computes tokens of the prompt returns the log-probabilities of the
    tokens after them.
    """

    sequence: Sequence
    tokens: list[int]
    needs_prompt_logprobs: bool = False

    @property
    def has_other_results(self) -> bool:
        """Whether its result is not tokens only."""
        return self.needs_prompt_logprobs or self.sequence.request.returns_value


class Direction(Enum):
    """The direction of a swap."""

    OUT = auto()  # from the device to the host
    IN = auto()  # from the host to the device


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block on the device and one on the host."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a block within the device."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Entry `index` of a sequence's block table becomes another block, which holds the same."""

    sequence_id: int
    index: int
    block_id: int


BlockHash = tuple[int, bytes]
"""A block id, and the hash of the block's tokens and of all tokens before."""


class MemoryPressure(Enum):
    """How short the memory of a worker's machine or container is, as the worker has measured it."""

    NONE = auto()
    HIGH = auto()  # nothing may make it grow
    CRITICAL = auto()  # it must shrink


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one replica, executed in this order: discarded blocks, finished sequences, swaps and copies, new
    sequences, forward pass.

    `block_hashes` and `host_block_hashes` are the contents of device and host blocks before the step writes any of
    them. The contents of `discarded_block_ids` and `discarded_host_block_ids` are lost, and their memory goes back to
    the system. `held_block_ids` are released when the step commits. `preempted` are the sequences preempted since the
    last step.

    `finished_ids` are the sequences that the worker forgets. One that ended with its value is not among them, unless
    the worker's protocol is older than 3: the worker has forgotten it with that step.
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
    discarded_block_ids: list[int] = field(default_factory=list)
    discarded_host_block_ids: list[int] = field(default_factory=list)
    held_block_ids: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(part.num_tokens for part in self.scheduled)


class FailureCause(Enum):
    """Why a worker could not continue a sequence."""

    INTERNAL = auto()
    GRAMMAR_TOO_COMPLEX = auto()  # for the limits of one token
    OUT_OF_MEMORY = auto()  # of the worker, in a step whose newest request it was


class SampledSequence(Protocol):
    """A worker's result for one scheduled sequence."""

    @property
    def token_ids(self) -> Seq[int]:
        """The sampled tokens."""

    @property
    def logprobs(self) -> Seq[object]:
        """One for each token, if requested. Not read here."""

    @property
    def failure(self) -> str | None:
        """Why this sequence failed, or None."""

    @property
    def failure_cause(self) -> FailureCause:
        """The same for the client. Meaningless without a failure."""


@dataclass(frozen=True, slots=True)
class ValueResult:
    """A worker's result for a sequence whose prompt is computed to its end: its value, which is not read here."""

    value: object
    token_ids: Seq[int] = ()
    logprobs: Seq[object] = ()
    failure: str | None = None
    failure_cause: FailureCause = FailureCause.INTERNAL


@dataclass(frozen=True, slots=True)
class SwapDone:
    """All swaps of one step in one direction are done, or failed."""

    step_id: int
    direction: Direction
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a worker returns for a step: results in the order of `StepPlan.scheduled`, and transfers that are done.

    `busy_seconds` is the time that the device took, if the worker reports it. `prompt_logprobs` are by index in
    `StepPlan.scheduled`: one for each token of the prompt after one that the step computed. `memory_pressure` is None
    if the worker has measured nothing new.
    """

    results: Seq[SampledSequence]
    swaps: Seq[SwapDone] = ()
    busy_seconds: float | None = None
    prompt_logprobs: Mapping[int, Seq[object]] = field(default_factory=dict)
    memory_pressure: MemoryPressure | None = None
