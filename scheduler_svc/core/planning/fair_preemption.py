"""Takes slots and blocks from running sequences for a waiting one of a higher class or of a tenant that holds less.

A running sequence yields to the head of the queue if

- the head outranks it: it has a higher priority, or
- its tenant is another one that has been served at least as much in the head's class, and that still holds no less
  than the head's tenant after the change, by weight; or that has been served `TURN_TOKENS` more.

It has then run for MIN_STEPS steps since it was admitted, or for none. Its blocks stay on the device while no block is
short. A beam search keeps its slots: its beams wait for each other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence

TURN_TOKENS = 64  # weighted tokens that a tenant may be ahead of one that waits, when both hold about the same


class FairPreemption:
    """Decides which running sequences yield to the head of the queue."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        waiting: WaitingSequences,
        capacity: Capacity,
        policy: PreemptionPolicy,
        preemptor: Preemptor,
        *,
        shares_by_tenant: bool,
    ) -> None:
        """`replicas` is the owner's own list. Without `shares_by_tenant` only lower classes yield."""
        self._replicas = replicas
        self._waiting = waiting
        self._capacity = capacity
        self._policy = policy
        self._preemptor = preemptor
        self._shares_by_tenant = shares_by_tenant

    def make_way(self, replica: Replica) -> Sequence | None:
        """Lets a running sequence yield if the head of the queue has a right to its slot or blocks.

        Returns the head if it can be admitted now. At most one request yields per step.
        """
        if not self._waiting.policy and not replica.swapped:
            return None
        head = self._waiting.head(replica)
        if head is None or head.is_one_of_beams or not replica.shape.computes(head.request):
            return None
        if (head.swapped_kv is not None and head.swapped_kv.num_swapping) or not self._may_claim(replica, head):
            return None
        if not self._capacity.has_free_slot(replica) and not self._make_slot(replica, head):
            return None
        return head if self._make_room(replica, head) else None

    def _may_claim(self, replica: Replica, head: Sequence) -> bool:
        """Whether sequences of other tenants or of lower priority run."""
        if self._shares_by_tenant and replica.num_slots_of.keys() - {head.request.tenant}:
            return True
        return bool(replica.running) and replica.running[-1].request.priority < head.request.priority

    def _make_slot(self, replica: Replica, head: Sequence) -> bool:
        if head.swapped_kv is None and any(self._may_take(other, head) for other in self._replicas):
            return False  # that replica admits it
        victim = next(self._victims(replica, head, *self._slots(head)), None)
        if victim is None:
            return False
        victim.has_yielded = True
        self._preemptor.take_slot(replica, victim)
        return self._capacity.has_free_slot(replica)

    def _may_take(self, replica: Replica, head: Sequence) -> bool:
        may_take = not replica.is_retired and not replica.swapped and replica.shape.computes(head.request)
        return may_take and self._capacity.has_free_slot(replica)

    def _make_room(self, replica: Replica, head: Sequence) -> bool:
        num_missing = self._num_missing_blocks(replica, head)
        if num_missing <= 0:
            return True
        # Decodes take some of the blocks before they are free.
        soon = self._policy.low_watermark(replica, len(replica.running))
        while num_missing + soon > replica.num_pending_free:
            if self._preemptor.release_kept(replica, but=head):
                continue
            own = Counter(s.request.tenant for s in replica.running for _ in s.block_ids)
            victim = next(self._victims(replica, head, own, num_missing), None)
            if victim is None:
                break
            victim.has_yielded = True
            self._preemptor.preempt(replica, victim)
        return False

    def _num_missing_blocks(self, replica: Replica, head: Sequence) -> int:
        kv = replica.kv
        if replica.shape.is_without_kv(head.request):
            return 0
        if head.swapped_kv is not None:
            num_needed = kv.num_needed_to_swap_in(head)
        else:
            num_needed = kv.num_needed(head, kv.match(head))
        return num_needed + self._capacity.measured_reserve(replica, head) - kv.num_available

    # Who yields.

    def _slots(self, head: Sequence) -> tuple[Counter[str], int]:
        """Slots that tenants hold on all replicas, and how many the head would take."""
        held: Counter[str] = Counter()
        for replica in self._replicas:
            held.update(replica.num_slots_of)
        return held, 1

    def _victims(self, replica: Replica, head: Sequence, held: Counter[str], num_needed: int) -> Iterator[Sequence]:
        """Running sequences that yield to the head, the first one first. `held` is what each tenant holds."""
        policy, now = self._waiting.policy, self._waiting.now
        rank = policy.effective_priority(head, now)
        for sequence in self._policy.victims(replica):
            if not _may_yield(sequence):
                continue
            if policy.outranks(head, sequence, now):
                yield sequence
            elif (
                self._shares_by_tenant
                and sequence.request.tenant != head.request.tenant
                and policy.effective_priority(sequence, now) <= rank
            ):
                ahead = policy.debt(sequence.request.tenant, rank) - policy.debt(head.request.tenant, rank)
                has_turn = ahead > TURN_TOKENS / head.request.weight
                if has_turn or (ahead >= 0 and _holds_more(sequence, head, held, num_needed)):
                    yield sequence


def _may_yield(sequence: Sequence) -> bool:
    has_begun = 0 < sequence.num_steps < MIN_STEPS
    return sequence.phase is Phase.RUNNING and not has_begun and sequence.request.beam is None


def _holds_more(victim: Sequence, head: Sequence, held: Counter[str], num_needed: int) -> bool:
    """Whether the victim's tenant holds no less than the head's once that has what it needs, by weight."""
    after = held[victim.request.tenant] - num_needed
    return after / victim.request.weight >= (held[head.request.tenant] + num_needed) / head.request.weight
