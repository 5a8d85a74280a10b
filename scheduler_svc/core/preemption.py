"""What gives way when blocks run out: who, and whether its blocks are swapped or its tokens computed again."""

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from weakref import WeakKeyDictionary

from scheduler_svc.core.explain import PreemptionMethod, PreemptionRecord
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Sequence

MIN_STEPS = 16  # a sequence that came in, or back, runs so many steps before it gives way, if another one can
_ORDER_STEPS = 8  # for which an order of victims holds
_PROBE_EVERY = 64  # preemptions by recompute, after which a swap is tried to learn what it costs by now
_PROBE_COST = 4  # times what recomputing takes, that it may be believed to take for that
_LOW_STEPS = 4  # steps of decodes for which blocks are kept available, by swapping ahead of need


class PreemptionMode(Enum):
    """How sequences that gave way are brought back."""

    AUTO = "auto"  # whichever costs less
    SWAP = "swap"  # where the host has room
    RECOMPUTE = "recompute"


class PreemptionPolicy:
    """Decides who gives way on a replica, and how it comes back."""

    def __init__(self, policy: Policy, mode: PreemptionMode) -> None:
        self._policy = policy
        self._mode = mode
        self._num_unswapped: WeakKeyDictionary[Replica, int] = WeakKeyDictionary()  # preemptions since the last swap
        self._orders: WeakKeyDictionary[Replica, _VictimOrder] = WeakKeyDictionary()

    def may_swap(self, replica: Replica) -> bool:
        """Whether anything is swapped at all."""
        return replica.shape.num_host_blocks > 0 and self._mode is not PreemptionMode.RECOMPUTE

    def compare_costs(self, replica: Replica, sequence: Sequence) -> PreemptionRecord:
        """What swapping a running sequence would cost, and what computing it again would, in seconds."""
        num_tail = len(replica.unshared_tail(sequence))
        kept = (len(sequence.block_ids) - num_tail) * replica.shape.block_size
        swap = replica.costs.swap_seconds(num_tail, num_tail) if replica.shape.num_host_blocks else math.inf
        recompute = replica.costs.recompute_seconds(max(0, sequence.num_computed - kept), kept)
        is_cheaper = swap <= recompute or self._mode is PreemptionMode.SWAP
        is_due = self._num_unswapped.get(replica, 0) >= _PROBE_EVERY and swap <= _PROBE_COST * recompute
        choice = (
            PreemptionMethod.SWAP if (is_cheaper or is_due) and self.may_swap(replica) else PreemptionMethod.RECOMPUTE
        )
        return PreemptionRecord(choice, swap, recompute)

    def record_choice(self, replica: Replica, choice: PreemptionMethod) -> None:
        """Note how a sequence gave way: what is never done is never learnt anew, so it is tried now and then."""
        self._num_unswapped[replica] = 0 if choice is PreemptionMethod.SWAP else self._num_unswapped.get(replica, 0) + 1

    def pick_victim(self, replica: Replica, protected_ids: set[int]) -> Sequence | None:
        """Who gives way first: by class, then by what its tenant owes, then who has the fewest blocks to bring back.

        The order is made anew every few steps, and holds for those between.
        """
        order = self._orders.get(replica)
        if order is None or replica.num_steps - order.made_at >= _ORDER_STEPS:
            ranked = sorted(replica.running, key=partial(self._preemption_key, replica), reverse=True)
            order = self._orders[replica] = _VictimOrder(replica.num_steps, ranked)
        candidates = (s for s in order.ranked if s.phase is Phase.RUNNING and s.replica is replica)
        later = None
        for sequence in candidates:
            if sequence.id in protected_ids:
                continue
            if sequence.num_steps >= MIN_STEPS:
                return sequence
            later = later or sequence
        if later is not None:
            return later
        # Whoever came since the order was made.
        return next(
            (s for s in reversed(replica.running) if s.phase is Phase.RUNNING and s.id not in protected_ids), None
        )

    def _preemption_key(self, replica: Replica, sequence: Sequence) -> tuple[float, ...]:
        rank, debt, *arrival = self._policy.preemption_key(sequence)
        return (rank, debt, -len(replica.unshared_tail(sequence)), *arrival)

    def should_swap_early(self, replica: Replica) -> bool:
        """Whether who gives way first would be swapped, and so had better leave before blocks run out."""
        if len(replica.running) == 1 or not self.may_swap(replica):
            return False
        victim = self.pick_victim(replica, set())
        if victim is None or victim.num_steps < MIN_STEPS:
            return False
        return self.compare_costs(replica, victim).choice is PreemptionMethod.SWAP

    def low_watermark(self, replica: Replica, num_decodes: int) -> int:
        """Blocks that should be available beyond those of this step, for the decodes of the next few."""
        return math.ceil(num_decodes * _LOW_STEPS / replica.shape.block_size)


@dataclass(frozen=True, slots=True)
class _VictimOrder:
    """Who gives way on a replica, first of all first, as it was at one of its steps."""

    made_at: int
    ranked: list[Sequence]
