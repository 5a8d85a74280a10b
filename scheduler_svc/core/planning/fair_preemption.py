"""Takes slots and blocks from running sequences for a waiting one of a higher class or of a tenant that holds less.

A running sequence yields to the head of the queue if

- the head outranks it: it has a higher priority, or
- its tenant is another one that has been served at least as much in the head's class, and that still holds no less
  than the head's tenant after the change, by weight; or that holds no less now and has been served `TURN_TOKENS` more.

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

        Returns the head if it can be admitted now. At most one sequence yields its slot in a step.
        """
        if not self._waiting.policy and not replica.swapped:
            return None
        head = self._waiting.head(replica)
        if head is None or head.is_one_of_beams or not replica.shape.computes(head.request):
            return None
        if (head.swapped_kv is not None and head.swapped_kv.num_swapping) or not self._may_claim(replica, head):
            return None
        if self._capacity.has_free_slot(replica):
            return head if self._make_room(replica, head) else None
        victim = self._slot_victim(replica, head)
        if victim is None or not self._make_room(replica, head):
            return None
        victim.has_yielded = self._preemptor.take_slot(replica, victim)
        return head if victim.has_yielded else None

    def _may_claim(self, replica: Replica, head: Sequence) -> bool:
        """Whether sequences of other tenants or of lower priority run, or others keep blocks without a slot."""
        if any(sequence is not head for sequence in replica.kept):
            return True
        if self._shares_by_tenant and replica.num_slots_of.keys() - {head.request.tenant}:
            return True
        return bool(replica.running) and replica.running[-1].request.priority < head.request.priority

    def take_waiting(self, replica: Replica) -> None:
        """Queues a sequence that waits for a slot on another replica, if this one has one and nothing else to admit.

        Its KV there is freed.
        """
        if self._waiting.policy or not replica.admits or not self._capacity.has_free_slot(replica):
            return
        if replica.has_returning:
            return
        for other in self._replicas:
            kept = [s for s in other.kept if self._may_be_taken(s, replica)]
            if kept and not self._capacity.has_free_slot(other):
                self._preemptor.drop_swapped(other, min(kept, key=self._waiting.rank))
                return

    def _may_be_taken(self, sequence: Sequence, replica: Replica) -> bool:
        """Whether a sequence would be admitted by a replica if it were queued."""
        shape = replica.shape
        return shape.computes(sequence.request) and self._waiting.accounts.may_run(sequence, shape)

    def _slot_victim(self, replica: Replica, head: Sequence) -> Sequence | None:
        if head.swapped_kv is None and any(self._may_take(other, head) for other in self._replicas):
            return None  # that replica admits it
        held: Counter[str] = Counter()
        for each in self._replicas:
            held.update(each.num_slots_of)
        return next(self._victims(replica, head, held, 1), None)

    def _may_take(self, replica: Replica, head: Sequence) -> bool:
        """Whether a replica has a slot and room for a queued sequence."""
        may_take = replica.admits and not replica.has_returning and replica.shape.computes(head.request)
        if not may_take or not self._capacity.has_free_slot(replica):
            return False
        num_needed = replica.kv.num_needed(head, replica.kv.match(head))
        return self._capacity.has_room(replica, head, num_needed)

    def _make_room(self, replica: Replica, head: Sequence) -> bool:
        if self._num_missing_blocks(replica, head) <= 0:
            return True
        # Decodes take some of the blocks before they are free.
        soon = self._policy.low_watermark(replica, len(replica.running))
        while (num_missing := self._num_missing_blocks(replica, head) + soon) > replica.num_pending_free:
            if self._preemptor.release_kept(replica, but=head):
                continue
            held: Counter[str] = Counter()
            for sequence in replica.running:
                held[sequence.request.tenant] += len(sequence.block_ids)
            victim = next(self._victims(replica, head, held, num_missing), None)
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
                has_turn = ahead > TURN_TOKENS / head.request.weight and _holds_more(sequence, head, held, 0)
                if has_turn or (ahead >= 0 and _holds_more(sequence, head, held, num_needed)):
                    yield sequence


def _may_yield(sequence: Sequence) -> bool:
    has_begun = 0 < sequence.num_steps < MIN_STEPS
    return sequence.phase is Phase.RUNNING and not has_begun and sequence.request.beam is None


def _holds_more(victim: Sequence, head: Sequence, held: Counter[str], num_needed: int) -> bool:
    """Whether the victim's tenant holds no less than the head's once that has what it needs, by weight."""
    after = held[victim.request.tenant] - num_needed
    return after / victim.request.weight >= (held[head.request.tenant] + num_needed) / head.request.weight
