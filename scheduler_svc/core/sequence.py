"""Requests and their sequences: what is known of each, and where it stands in its life."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto


class Phase(Enum):
    """Where a sequence stands. Legal moves are in `Sequence.move`, and nowhere else."""

    QUEUED = auto()  # holds no blocks
    RUNNING = auto()  # holds blocks on a replica
    PREEMPTED = auto()  # lost its blocks, but a step in flight still names them; queued again once that is done
    ENDED = auto()


_MOVES = {
    Phase.QUEUED: {Phase.RUNNING, Phase.ENDED},
    Phase.RUNNING: {Phase.QUEUED, Phase.PREEMPTED, Phase.ENDED},
    Phase.PREEMPTED: {Phase.QUEUED, Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `sampling` is for the worker and not read here; `deadline` is on the monotonic clock."""

    key: str
    prompt: list[int]
    n: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    sampling: object = None
    has_stop_strings: bool = False
    priority: int = 0
    tenant: str = "default"
    weight: float = 1.0
    salt: bytes = b""
    deadline: float | None = None
    traceparent: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's continuations.

    Its known tokens are `tokens`, whose values are here, and `num_promised` more that steps in flight will draw.
    `num_computed` of them have keys and values once every step in flight is done, `num_committed` have them now.
    """

    id: int
    request: Request
    index: int
    arrival: int
    tokens: list[int]
    phase: Phase = Phase.QUEUED
    num_losses: int = 0  # workers that were lost while they computed it, since its last token
    num_promised: int = 0
    num_computed: int = 0
    num_committed: int = 0
    num_in_flight: int = 0  # steps in flight that name it
    num_acknowledged: int = 0  # output tokens that the gateway has searched for stop strings
    num_cached: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that the prefix index has been told of

    def move(self, phase: Phase) -> None:
        """Go on to another phase."""
        if phase not in _MOVES[self.phase]:
            raise AssertionError(f"sequence {self.id} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return (-self.request.priority, self.arrival, self.index)

    @property
    def num_known(self) -> int:
        """Tokens that exist, promised ones included."""
        return len(self.tokens) + self.num_promised

    @property
    def num_output(self) -> int:
        """Output tokens whose values are known here."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_uncomputed(self) -> int:
        """How many known tokens are still to compute: the one thing that scheduling is about."""
        return self.num_known - self.num_computed

    def append(self, token_ids: Seq[int]) -> None:
        """Add tokens that were drawn."""
        if self.tokens is self.request.prompt:
            self.tokens = list(self.tokens)  # shared by all sequences of the request until they differ
        self.tokens.extend(token_ids)

    def is_plannable(self, stop_lead: int) -> bool:
        """Whether another step makes sense: not when the tokens promised end it, nor too far beyond the gateway."""
        num_output = self.num_known - len(self.request.prompt)
        if num_output >= self.request.max_tokens or self.num_uncomputed == 0:
            return False
        return not self.request.has_stop_strings or num_output < self.num_acknowledged + stop_lead

    def forget_blocks(self) -> None:
        """Start over with nothing computed; called when its blocks are gone."""
        self.block_ids = []
        self.num_computed = self.num_committed = self.num_published = 0
