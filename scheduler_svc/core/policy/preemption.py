"""Which running sequence is preempted when blocks run out, and whether it is swapped or recomputed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import PreemptionMethod, PreemptionRecord, Sequence

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
        return replica.may_swap_out and self._mode is not PreemptionMode.RECOMPUTE

    def compare_costs(self, replica: Replica, sequence: Sequence) -> PreemptionRecord:
        """What it would cost to swap a running sequence or its search, or to recompute it, in seconds; the method."""
        num_tail = self._num_own_blocks(replica, sequence)
        swap = replica.costs.swap_seconds(num_tail, num_tail) if replica.shape.num_host_blocks else math.inf
        if sequence.request.beam is None:
            kept = (len(sequence.block_ids) - num_tail) * replica.shape.block_size
            num_tokens = max(0, sequence.num_computed - kept)
        else:
            tables = [beam.block_ids for beam in sequence.unit]
            num_freed = replica.kv.num_freed(tables)
            kept = (len(set(chain.from_iterable(tables))) - num_freed) * replica.shape.block_size
            num_tokens = num_freed * replica.shape.block_size
        recompute = replica.costs.recompute_seconds(num_tokens, kept)
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
            if not protected_ids.isdisjoint(each.id for each in sequence.unit):
                continue
            if sequence.num_steps >= MIN_STEPS:
                return sequence
            recent = recent or sequence
        if recent is not None:
            return recent
        # One that was admitted since the order was made.
        others = (s for s in reversed(replica.running) if s.is_unit_running)
        return next((s for s in others if protected_ids.isdisjoint(each.id for each in s.unit)), None)

    def victims(self, replica: Replica) -> Iterator[Sequence]:
        """Running sequences in the order in which they are preempted, without those that were admitted lately.

        Of a search, whose beams are preempted together, one.
        """
        order = self._orders.get(replica)
        if order is None or replica.num_steps - order.made_at >= _ORDER_STEPS:
            units = [s for s in replica.running if s.request.beam is None or s is s.siblings[0]]
            ranked = sorted(units, key=partial(self.preemption_key, replica), reverse=True)
            order = self._orders[replica] = _VictimOrder(replica.num_steps, ranked)
        for each in order.ranked:
            sequence = each if each.request.beam is None or not each.siblings else each.siblings[0]
            if sequence.is_unit_running and sequence in replica.running:
                yield sequence

    def preemption_key(self, replica: Replica, sequence: Sequence) -> tuple[float, ...]:
        """The policy's key, with the number of the sequence's own blocks: of a tenant's, the smallest is first."""
        rank, debt, *arrival = self._policy.preemption_key(sequence)
        return (rank, debt, -self._num_own_blocks(replica, sequence), *arrival)

    def _num_own_blocks(self, replica: Replica, sequence: Sequence) -> int:
        return sum(len(replica.kv.unshared_tail(each)) for each in sequence.unit)

    def should_swap_early(self, replica: Replica) -> bool:
        """Whether the next victim would be swapped, so that its copy should begin before blocks run out."""
        if len(replica.running) == 1 or not self.may_swap(replica):
            return False
        victim = self.pick_victim(replica, set())
        if victim is None or victim.num_steps < MIN_STEPS or len(victim.unit) == len(replica.running):
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
