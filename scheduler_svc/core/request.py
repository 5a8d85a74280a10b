"""Requests and their sequences: what is known of each, and its phase."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_svc.core.account_limits import NO_LIMITS, AccountLimits
from scheduler_svc.core.budgets import Charge
from scheduler_svc.core.results import TOKENS, ResultForm, ResultKind

FIRST_TOKEN_FACTOR = 4.0
"""A first token is due so many times as long after the arrival of its request as the prompt takes alone.

Once it has a slot, a long prompt gets the share of time with which it comes so long after its admission at the latest.
"""
STOP_STRING_LEAD = 64  # tokens that a sequence with stop strings may run ahead of the gateway's search


class Phase(Enum):
    """A sequence's phase. `_TRANSITIONS` has the legal transitions."""

    QUEUED = auto()  # holds no blocks
    WAITING_FOR_PREFIX = auto()  # holds no blocks; another sequence computes a prefix that it will reuse
    SWAPPING_IN = auto()  # holds blocks on a replica, some of which are being copied from the host
    RUNNING = auto()  # holds blocks on a replica
    PREEMPTED = auto()  # waits until no step in flight names its blocks; then they are freed or swapped
    SWAPPED = auto()  # its unshared KV is in host memory, shared blocks stay; waits for room on its replica
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


_HOLDS_SLOT = (Phase.SWAPPING_IN, Phase.RUNNING)


class PreemptionMethod(Enum):
    """What happens to the KV of a preempted sequence."""

    SWAP = auto()
    RECOMPUTE = auto()
    KEEP = auto()  # it stays on the device: the sequence gave up its slot, and no block was short


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """A sequence's last preemption: the method, and the estimated cost of both methods in seconds."""

    method: PreemptionMethod
    swap_seconds: float
    recompute_seconds: float


@dataclass(slots=True)
class SwappedKV:
    """The KV of a swapped sequence: device blocks that it shares with others and keeps, then host blocks.

    They hold its first `num_tokens` tokens; the shared ones may hold up to the first `num_cached_tokens`. With
    `is_kept` all blocks stayed on the device, of which the first `num_published` are in the prefix index.
    """

    kept_block_ids: list[int]
    host_ids: list[int]
    num_tokens: int
    num_cached_tokens: int
    num_swapping: int = 0  # host blocks whose copy is not confirmed
    is_kept: bool = False
    num_published: int = 0


class EarlyStopping(Enum):
    """When a search ends that has `width` finished sequences."""

    HEURISTIC = auto()  # if no beam, ended now, would score better than the worst of them
    AT_WIDTH = auto()  # immediately
    NEVER = auto()  # if no beam can score better than the worst of them at any length


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search.

    A finished sequence's score is its log-probability over its length to the power of `length_penalty`. `logprobs` is
    how many top tokens to return per token; None if no log-probabilities were requested.
    """

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `sampling` and `result_params` are for the worker and not read here.

    With `beam`, its result is the `n` best sequences of a beam search. If its result is one value for the prompt, the
    value counts as its only token: `max_tokens` is 1. `arrived_at` and `deadline` are on the driver's clock,
    in seconds.
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
    protocol: int = 1  # the oldest version of the step stream that has all of its parameters
    beam: BeamParams | None = None
    result: ResultKind = TOKENS
    result_params: object = None
    limits: AccountLimits = NO_LIMITS

    @property
    def returns_value(self) -> bool:
        """Whether its result is one value for the whole prompt."""
        return self.result.form is ResultForm.VALUE

    @property
    def ends_anywhere(self) -> bool:
        """Whether its sequences may end before `max_tokens`: not a beam search, which returns whole sequences."""
        return self.beam is None and not self.returns_value

    @property
    def num_slots(self) -> int:
        """Slots that one of its sequences holds, or all beams of a search together."""
        return 1 if self.beam is None else self.beam.width

    @property
    def max_length(self) -> int:
        """The most tokens that one of its sequences may have."""
        return len(self.prompt) + (0 if self.returns_value else self.max_tokens)

    def due_by(self, at: float) -> float:
        """A time on the driver's clock, or the deadline if that is earlier."""
        return at if self.deadline is None else min(at, self.deadline)

    def max_blocks(self, block_size: int) -> int:
        """The most blocks that one of its sequences may take, or all its beams, which share the prompt."""
        if self.beam is None:
            return -(-self.max_length // block_size)
        num_own = -(-(self.max_tokens + len(self.prompt) % block_size) // block_size)
        return len(self.prompt) // block_size + self.beam.width * num_own

    @property
    def search_tokens(self) -> int | None:
        """The most tokens that a beam search is charged for, 0 for a value; None if it samples token by token."""
        if self.beam is not None:
            return self.beam.width * self.max_tokens
        return 0 if self.returns_value else None

    @property
    def least_output(self) -> int:
        """Output tokens that each of its sequences has at least."""
        if self.stop_token_ids or self.has_stop_strings or self.beam is not None:
            return max(1, self.min_tokens)
        return self.max_tokens

    def num_until_end(self, num_output: int, token_ids: Seq[int]) -> int:
        """How many of these tokens count, after `num_output` others: up to the first stop token."""
        for count, token in enumerate(token_ids, 1):
            if token in self.stop_token_ids and num_output + count > self.min_tokens:
                return count
        return len(token_ids)


@dataclass(frozen=True, slots=True)
class RestoredSequence:
    """A sequence of a request that an earlier scheduler had accepted.

    Its output tokens; whether it has ended with them, or with its value; for how many tokens of the prompt
    log-probabilities were returned; and whether its account has paid for the prompt.
    """

    token_ids: list[int]
    ended: bool
    num_prompt_logprobs: int = 0
    is_prompt_paid: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's continuations.

    Its known tokens are `tokens` and `num_promised` more that steps in flight will sample. `num_computed` of them have
    KV once all steps in flight are done; `num_committed` have KV now.
    """

    id: int
    request: Request
    index: int
    arrival: int
    tokens: list[int]
    phase: Phase = Phase.QUEUED
    siblings: "list[Sequence]" = field(default_factory=list)  # all of its request, itself included
    num_promised: int = 0
    num_extra: int = 0  # the most tokens that steps in flight may return beyond those promised
    num_computed: int = 0
    num_committed: int = 0
    num_steps_in_flight: int = 0  # steps in flight that name it
    num_acknowledged: int = 0  # output tokens that the gateway has searched for stop strings
    num_cached_prompt_tokens: int | None = None  # found in the prefix cache when it was first admitted; for usage
    num_preemptions: int = 0
    prompt_seconds: float = 0.0  # that its known tokens take alone, as predicted when it was last queued
    waited: float = 0.0  # seconds that it has waited before it was last admitted
    waits_since: float | None = None  # on the driver's clock; None while it runs
    has_yielded: bool = False  # it waits because another one had a right to its slot or blocks
    num_steps: int = 0  # since it was last admitted
    num_prompt_logprobs: int = 0  # returned so far; the first token of the prompt has none
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that are in the prefix index
    num_cached_tokens: int = 0  # leading tokens whose KV was in its blocks when it was last admitted; not written again
    num_sent_blocks: int | None = None  # blocks of its table that the worker knows; None: it does not know the sequence
    swapped_kv: SwappedKV | None = None
    last_preemption: PreemptionRecord | None = None
    charge: Charge | None = None  # of its request; None: its account has no limit of tokens
    max_tokens: int = field(init=False)  # the request's, or fewer: see fit_context()

    def __post_init__(self) -> None:
        self.max_tokens = self.request.max_tokens

    def set_phase(self, phase: Phase) -> None:
        """Changes the phase. Raises AssertionError if that is not a legal transition."""
        if phase not in _TRANSITIONS[self.phase]:
            raise AssertionError(f"sequence {self.id} cannot go from {self.phase} to {phase}")
        if self.charge is not None:
            self.charge.note_slots((phase in _HOLDS_SLOT) - (self.phase in _HOLDS_SLOT))
            self.charge.budget.num_live -= phase is Phase.ENDED
        self.phase = phase

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Sort key on a replica: higher priority first, then earlier arrival."""
        return (-self.request.priority, self.request.arrived_at, self.arrival, self.index)

    @property
    def first_token_due(self) -> float:
        """When its first token is due, in the driver's seconds; its arrival if it has any. Constant while it waits."""
        return self.request.arrived_at + (0.0 if self.num_output else FIRST_TOKEN_FACTOR * self.prompt_seconds)

    @property
    def unit(self) -> "list[Sequence]":
        """The sequences that get and give up slots and blocks together: all beams of its search, or it alone."""
        return self.siblings if self.request.beam is not None else [self]

    @property
    def is_unit_running(self) -> bool:
        """Whether it runs, and all beams of its search do."""
        if self.request.beam is None:
            return self.phase is Phase.RUNNING
        return all(beam.phase is Phase.RUNNING for beam in self.siblings)

    @property
    def is_leaving(self) -> bool:
        """Whether steps in flight, or copies to the host, must be done before it can be resumed with its search."""
        return any(
            each.phase is Phase.PREEMPTED or (each.swapped_kv is not None and each.swapped_kv.num_swapping > 0)
            for each in self.unit
        )

    def num_fork_blocks(self, block_size: int) -> int:
        """The most blocks that beams of its search take which are still to be forked; 0 if it is not of a search."""
        if self.request.beam is None:
            return 0
        num_own = -(-(len(self.tokens) + 1) // block_size) - len(self.request.prompt) // block_size
        return (self.request.beam.width - len(self.siblings)) * num_own

    @property
    def is_one_of_beams(self) -> bool:
        """Whether it is one of several beams. The worker is sent each of them again and again."""
        return self.request.beam is not None and self.num_output > 0

    @property
    def ages_from(self) -> float:
        """When it would have arrived if it had waited ever since. It must be waiting."""
        assert self.waits_since is not None
        return self.waits_since - self.waited

    def seconds_waited(self, now: float) -> float:
        """How long it has waited in all; time in which it ran does not count."""
        return self.waited + (max(0.0, now - self.waits_since) if self.waits_since is not None else 0.0)

    def start_waiting(self, now: float) -> None:
        """It waits from now on. Does nothing if it waits already."""
        if self.waits_since is None:
            self.waits_since = now

    def stop_waiting(self, now: float) -> None:
        """It runs from now on."""
        self.waited = self.seconds_waited(now)
        self.waits_since = None
        self.has_yielded = False

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
        """Known tokens that are not computed yet."""
        return self.num_known - self.num_computed

    @property
    def is_decode(self) -> bool:
        """Whether it runs and has one token to compute."""
        return self.phase is Phase.RUNNING and len(self.tokens) + self.num_promised - self.num_computed == 1

    @property
    def is_prefill(self) -> bool:
        """Whether it runs and has several tokens to compute."""
        return self.phase is Phase.RUNNING and len(self.tokens) + self.num_promised - self.num_computed > 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether it still has to return log-probabilities of the prompt. A request's first sequence returns them."""
        if self.index or self.request.result.form is not ResultForm.TOKENS_AND_PROMPT_LOGPROBS:
            return False
        return self.num_prompt_logprobs < len(self.request.prompt) - 1

    @property
    def can_pay(self) -> bool:
        """Whether its account has enough tokens to give it a slot."""
        return self.charge is None or self.num_needed_tokens <= self.charge.budget.available

    @property
    def num_needed_tokens(self) -> int:
        """How many tokens its account must have available before it gets a slot; 0 without a limit."""
        return 0 if self.charge is None else self.charge.num_needed(max(1, self.request.max_tokens - self.num_output))

    def note_shortfall(self) -> None:
        """It cannot run before its account has the tokens that it needs."""
        if self.charge is not None:
            self.charge.budget.note_shortfall(self.num_needed_tokens)

    @property
    def has_budget(self) -> bool:
        """Whether its account has a token left for its next step."""
        return self.charge is None or self.charge.has_tokens

    @property
    def is_plannable(self) -> bool:
        """Whether another step makes sense, and its account can pay for it."""
        return (self.charge is None or self.charge.has_tokens) and self.wants_step

    @property
    def wants_step(self) -> bool:
        """Whether another step makes sense.

        Not if the promised tokens end it, nor if it is STOP_STRING_LEAD tokens ahead of the gateway's search.
        """
        request, num_known = self.request, len(self.tokens) + self.num_promised
        num_output, num_uncomputed = num_known - len(request.prompt), num_known - self.num_computed
        # With speculation steps in flight may return more tokens: what is planned must fit after the most.
        num_output += self.num_extra
        if num_output >= self.max_tokens or num_uncomputed == 0:
            return False
        if request.beam is not None:
            return not self.num_promised  # its next token is chosen among all beams
        # After a preemption it is computed again however far ahead it is: others may wait for its prefix.
        return (
            not request.has_stop_strings or num_uncomputed > 1 or num_output < self.num_acknowledged + STOP_STRING_LEAD
        )

    def fit_context(self, context_length: int) -> None:
        """Ends where the context does, which may be smaller than when its request was accepted; 0: it is not known."""
        if context_length and self.request.ends_anywhere:
            self.max_tokens = min(self.request.max_tokens, context_length - len(self.request.prompt))

    def charge_to(self, charge: Charge | None) -> None:
        """Its tokens are paid from this charge from now on."""
        self.charge = charge
        if charge is not None:
            charge.budget.num_live += 1

    def restore(self, known: RestoredSequence) -> None:
        """Starts after tokens that are known, or ended."""
        request, num_output = self.request, len(known.token_ids)
        self.num_prompt_logprobs = known.num_prompt_logprobs
        if known.ended:
            self.set_phase(Phase.ENDED)
        else:
            assert request.beam is None or not known.token_ids, "a beam search starts over"
            assert num_output < request.max_tokens, "a sequence that has all its tokens has ended"
            is_stop = num_output > request.min_tokens and known.token_ids[-1] in request.stop_token_ids
            assert not is_stop, "a sequence that has its stop token has ended"
        if known.token_ids:
            self.append(known.token_ids)
        self.num_acknowledged = num_output

    def append(self, token_ids: Seq[int]) -> None:
        """Adds sampled tokens."""
        if self.tokens is self.request.prompt:
            self.tokens = list(self.tokens)  # shared by all sequences of the request until they differ
        self.tokens.extend(token_ids)

    def forget_blocks(self) -> None:
        """Resets to nothing computed. Its blocks are released already."""
        self.block_ids = []
        self.num_computed = self.num_committed = self.num_published = self.num_cached_tokens = 0
