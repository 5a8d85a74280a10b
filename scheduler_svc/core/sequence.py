"""Requests and their sequences: what is known of each, and where it stands in its life."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from scheduler_svc.core.beam_search import BeamParams
from scheduler_svc.core.explain import PreemptionRecord

if TYPE_CHECKING:
    from scheduler_svc.core.replica import Replica


class Phase(Enum):
    """Where a sequence stands. Legal moves are in `_TRANSITIONS`, and nowhere else."""

    QUEUED = auto()  # holds no blocks
    WAITING_FOR_PREFIX = auto()  # holds none: another one computes what it would compute, and it takes that up
    SWAPPING_IN = auto()  # holds blocks on a replica, some of which are on their way from the host
    RUNNING = auto()  # holds blocks on a replica
    PREEMPTED = auto()  # is to give up its blocks, but a step in flight still names them
    SWAPPED = auto()  # has an image, and waits for room on its replica
    ENDED = auto()


_TRANSITIONS = {
    Phase.QUEUED: {Phase.WAITING_FOR_PREFIX, Phase.SWAPPING_IN, Phase.RUNNING, Phase.ENDED},
    Phase.WAITING_FOR_PREFIX: {Phase.QUEUED, Phase.ENDED},
    Phase.SWAPPING_IN: {Phase.RUNNING, Phase.QUEUED, Phase.PREEMPTED, Phase.ENDED},
    Phase.RUNNING: {Phase.QUEUED, Phase.PREEMPTED, Phase.ENDED},
    Phase.PREEMPTED: {Phase.QUEUED, Phase.SWAPPED, Phase.ENDED},
    Phase.SWAPPED: {Phase.SWAPPING_IN, Phase.RUNNING, Phase.QUEUED, Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


@dataclass(slots=True)
class SwappedKV:
    """Where the keys and values of a swapped sequence are: in blocks of the device that it shares with others, and
    keeps, and behind these in blocks of the host. They are of its first `num_tokens` tokens; those in shared blocks may
    go on to the first `num_stored`.
    """

    kept_block_ids: list[int]
    host_ids: list[int]
    num_tokens: int
    num_stored: int
    num_swapping: int = 0  # blocks that are not known to be there yet


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `sampling` is for the worker and not read here. With `beam`, the `n` best of a search.

    `arrived_at` and `deadline` are on the driver's clock, in seconds.
    """

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
    arrived_at: float = 0.0
    deadline: float | None = None
    traceparent: str = ""
    beam: BeamParams | None = None


@dataclass(frozen=True, slots=True)
class RestoredSequence:
    """What is known already of a request's sequence: its output tokens, and whether it ended with them."""

    token_ids: list[int]
    ended: bool


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
    siblings: "list[Sequence]" = field(default_factory=list)  # all of its request, itself included
    replica: "Replica | None" = None  # where it has blocks or an image
    num_promised: int = 0
    num_extra: int = 0  # the most tokens that steps in flight may return beyond those promised
    num_computed: int = 0
    num_committed: int = 0
    num_in_flight: int = 0  # steps in flight that name it
    num_acknowledged: int = 0  # output tokens that the gateway has searched for stop strings
    num_cached: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    num_steps: int = 0  # that it was in since it was admitted last
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that the prefix index has been told of
    num_stored: int = 0  # leading tokens whose keys and values were in its blocks when it was admitted
    num_sent_blocks: int | None = None  # blocks of its table that the worker knows; None: the worker does not know it
    swapped_kv: SwappedKV | None = None
    last_preemption: PreemptionRecord | None = None

    def set_phase(self, phase: Phase) -> None:
        """Go on to another phase."""
        if phase not in _TRANSITIONS[self.phase]:
            raise AssertionError(f"sequence {self.id} cannot go from {self.phase} to {phase}")
        self.phase = phase

    @property
    def order(self) -> tuple[int, int, int]:
        """How sequences stand on a replica: the higher priority before, then the earlier arrival."""
        return (-self.request.priority, self.arrival, self.index)

    @property
    def is_one_of_beams(self) -> bool:
        """Whether it is one of several beams, which hold blocks while they wait for each other."""
        return self.request.beam is not None and self.num_output > 0

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

    @property
    def is_decode(self) -> bool:
        """Whether it runs and has one token to compute."""
        return self.phase is Phase.RUNNING and len(self.tokens) + self.num_promised - self.num_computed == 1

    @property
    def is_prefill(self) -> bool:
        """Whether it runs and has several tokens to compute."""
        return self.phase is Phase.RUNNING and len(self.tokens) + self.num_promised - self.num_computed > 1

    def restore(self, known: RestoredSequence) -> None:
        """Begin behind tokens that are known, or with the end."""
        request, num_output = self.request, len(known.token_ids)
        if known.ended:
            self.set_phase(Phase.ENDED)
        else:
            assert request.beam is None or not known.token_ids, "a search begins anew"
            assert num_output < request.max_tokens, "a sequence that has all its tokens has ended"
            is_stop = num_output > request.min_tokens and known.token_ids[-1] in request.stop_token_ids
            assert not is_stop, "a sequence that has its stop token has ended"
        if known.token_ids:
            self.append(known.token_ids)
        self.num_acknowledged = num_output

    def append(self, token_ids: Seq[int]) -> None:
        """Add tokens that were drawn."""
        if self.tokens is self.request.prompt:
            self.tokens = list(self.tokens)  # shared by all sequences of the request until they differ
        self.tokens.extend(token_ids)

    def is_plannable(self, stop_string_lead: int) -> bool:
        """Whether another step makes sense: not when the tokens promised end it, nor too far beyond the gateway."""
        request, num_known = self.request, len(self.tokens) + self.num_promised
        num_output, num_uncomputed = num_known - len(request.prompt), num_known - self.num_computed
        # With speculation the tokens in flight may be more: what is planned must fit behind the most.
        num_output += self.num_extra
        if num_output >= request.max_tokens or num_uncomputed == 0:
            return False
        if request.beam is not None:
            return not self.num_promised  # what comes next is chosen among all beams
        # One that comes back computes what others may wait for, however far ahead it is.
        return (
            not request.has_stop_strings or num_uncomputed > 1 or num_output < self.num_acknowledged + stop_string_lead
        )

    def forget_blocks(self) -> None:
        """Start over with nothing computed; called when its blocks are gone."""
        self.block_ids = []
        self.num_computed = self.num_committed = self.num_published = self.num_stored = 0
