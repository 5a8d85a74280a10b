"""Which running sequence is preempted when blocks run out, and whether it is swapped or recomputed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, PreemptionMethod, PreemptionRecord, Sequence

MIN_STEPS = 16  # steps after its admission in which a sequence is preempted only if there is no other victim
_ORDER_STEPS = 8  # steps for which an order of victims holds
_PROBE_EVERY = 64  # recomputations after which a swap is tried, to learn what it costs now
_PROBE_COST = 4  # a swap is tried only if it is estimated to cost at most this many times a recomputation
_LOW_STEPS = 4  # steps of decodes for which blocks are kept available, by swapping before they are needed


class PreemptionMode(Enum):
    """What happens to the KV of preempted sequences."""

    AUTO = "auto"  # whichever is estimated to cost less
    SWAP = "swap"  # if the host has room
    RECOMPUTE = "recompute"


class PreemptionPolicy:
    """Decides which sequence of a replica is preempted, and how."""

    def __init__(self, policy: Policy, mode: PreemptionMode) -> None:
        self._policy = policy
        self._mode = mode
        self._num_unswapped: WeakKeyDictionary[Replica, int] = WeakKeyDictionary()  # preemptions since the last swap
        self._orders: WeakKeyDictionary[Replica, _VictimOrder] = WeakKeyDictionary()

    def may_swap(self, replica: Replica) -> bool:
        """Whether sequences of a replica may be swapped."""
        return replica.shape.num_host_blocks > 0 and self._mode is not PreemptionMode.RECOMPUTE

    def compare_costs(self, replica: Replica, sequence: Sequence) -> PreemptionRecord:
        """What swapping a running sequence would cost, and what recomputing it would, in seconds; and the method."""
        num_tail = len(replica.kv.unshared_tail(sequence))
        kept = (len(sequence.block_ids) - num_tail) * replica.shape.block_size
        swap = replica.costs.swap_seconds(num_tail, num_tail) if replica.shape.num_host_blocks else math.inf
        recompute = replica.costs.recompute_seconds(max(0, sequence.num_computed - kept), kept)
        is_cheaper = swap <= recompute or self._mode is PreemptionMode.SWAP
        is_due = self._num_unswapped.get(replica, 0) >= _PROBE_EVERY and swap <= _PROBE_COST * recompute
        method = (
            PreemptionMethod.SWAP if (is_cheaper or is_due) and self.may_swap(replica) else PreemptionMethod.RECOMPUTE
        )
        return PreemptionRecord(method, swap, recompute)

    def record_method(self, replica: Replica, method: PreemptionMethod) -> None:
        """Counts recomputations: without a swap now and then, its cost would never be measured again."""
        self._num_unswapped[replica] = 0 if method is PreemptionMethod.SWAP else self._num_unswapped.get(replica, 0) + 1

    def pick_victim(self, replica: Replica, protected_ids: set[int]) -> Sequence | None:
        """The next sequence to preempt: by class, then by its tenant's debt, then the one with the fewest own blocks.

        The order is made anew every few steps, and holds for those between.
        """
        recent = None
        for sequence in self.victims(replica):
            if sequence.id in protected_ids:
                continue
            if sequence.num_steps >= MIN_STEPS:
                return sequence
            recent = recent or sequence
        if recent is not None:
            return recent
        # One that was admitted since the order was made.
        return next(
            (s for s in reversed(replica.running) if s.phase is Phase.RUNNING and s.id not in protected_ids), None
        )

    def victims(self, replica: Replica) -> Iterator[Sequence]:
        """Running sequences in the order in which they are preempted, without those that were admitted lately."""
        order = self._orders.get(replica)
        if order is None or replica.num_steps - order.made_at >= _ORDER_STEPS:
            ranked = sorted(replica.running, key=partial(self.preemption_key, replica), reverse=True)
            order = self._orders[replica] = _VictimOrder(replica.num_steps, ranked)
        for sequence in order.ranked:
            if sequence.phase is Phase.RUNNING and sequence in replica.running:
                yield sequence

    def preemption_key(self, replica: Replica, sequence: Sequence) -> tuple[float, ...]:
        """The policy's key, with the number of the sequence's own blocks: of a tenant's, the smallest is first."""
        rank, debt, *arrival = self._policy.preemption_key(sequence)
        return (rank, debt, -len(replica.kv.unshared_tail(sequence)), *arrival)

    def should_swap_early(self, replica: Replica) -> bool:
        """Whether the next victim would be swapped, so that its copy should begin before blocks run out."""
        if len(replica.running) == 1 or not self.may_swap(replica):
            return False
        victim = self.pick_victim(replica, set())
        if victim is None or victim.num_steps < MIN_STEPS:
            return False
        return self.compare_costs(replica, victim).method is PreemptionMethod.SWAP

    def low_watermark(self, replica: Replica, num_decodes: int) -> int:
        """Blocks that should be available beyond those of this step: what decodes need in the next few steps."""
        return math.ceil(num_decodes * _LOW_STEPS / replica.shape.block_size)


@dataclass(frozen=True, slots=True)
class _VictimOrder:
    """Running sequences of a replica in the order in which they are preempted, as of one of its steps."""

    made_at: int
    ranked: list[Sequence]
