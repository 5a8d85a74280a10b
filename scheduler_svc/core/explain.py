"""Why a request waits, or how it runs: what the core tells of it to a person who asks."""

from dataclasses import dataclass
from enum import Enum, auto


class SequenceStatus(Enum):
    """Where a sequence stands, as a person would say it; in the order in which sequences get further."""

    QUEUED = auto()  # has not run yet: waits for its turn, or for blocks
    WAITING_FOR_PREFIX = auto()  # waits for blocks that another request is computing
    PREEMPTED = auto()  # gave way, and waits to compute its tokens again
    SWAPPED = auto()  # gave way; its blocks stand in host memory
    SWAPPING_IN = auto()  # its blocks are on their way from host memory
    PAUSED = auto()  # as far ahead of its gateway's search for stop strings as it may be
    RUNNING = auto()
    ENDED = auto()


class PreemptionMethod(Enum):
    """How a sequence that gave way comes back."""

    SWAP = auto()
    RECOMPUTE = auto()


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """The last time that a sequence gave way: what was chosen, and both estimates, in seconds."""

    choice: PreemptionMethod
    swap_seconds: float
    recompute_seconds: float


@dataclass(frozen=True, slots=True)
class SequenceExplanation:
    """One sequence.

    `num_ahead` is how many sequences would go before it, None where it does not wait; `awaits_key` the request whose
    blocks it waits for. `num_missing_blocks` are those that it needs to go on and that cannot be had on the device
    now. `predicted_start` is in seconds from now, None where it runs or nothing can be said.
    """

    index: int
    status: SequenceStatus
    num_known: int
    num_computed: int
    num_generated: int
    num_device_blocks: int
    num_host_blocks: int
    num_missing_blocks: int = 0
    num_ahead: int | None = None
    awaits_key: str | None = None
    num_preemptions: int = 0
    last_preemption: PreemptionRecord | None = None
    predicted_start: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One live request. `age` and `time_left`, until its deadline, are in seconds.

    `effective_priority` is the class that it counts as now. `tenant_debt` is its tenant's virtual token counter less
    the smallest of its class. `num_waiting` requests wait in all, this one included where it waits.
    """

    key: str
    tenant: str
    policy: str
    priority: int
    effective_priority: int
    tenant_debt: float
    age: float
    time_left: float | None
    num_prompt: int
    max_tokens: int
    num_waiting: int
    sequences: tuple[SequenceExplanation, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A live request in a line. `status` is that of its sequence that has got furthest, `age` is in seconds."""

    key: str
    tenant: str
    priority: int
    status: SequenceStatus
    age: float
    num_prompt: int
    num_generated: int
