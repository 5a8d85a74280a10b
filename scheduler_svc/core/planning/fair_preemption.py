"""Takes slots and blocks from running sequences for a waiting one of a higher class or of a tenant that holds less.

A running sequence yields to the head of the queue if

- the head outranks it: it has a higher priority, or
- its tenant is another one that has been served at least as much in the head's class, and that still holds no less
  than the head's tenant after the change, by weight; or that holds no less now and has been served `TURN_TOKENS` more.

It has then run for MIN_STEPS steps since it was admitted, or for none. Its blocks stay on the device while no block is
short. A beam search takes and yields the slots of all its beams together. If that is more than the head lacks, its
tenant counts as if it gave up only so many.
"""

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.policy.order import Policy
from scheduler_svc.core.policy.preemption import MIN_STEPS, PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

TURN_TOKENS = 64  # weighted tokens that a tenant may be ahead of one that waits, when both hold about the same

MAX_TOGETHER = 4  # requests for which slots are yielded in one step


class _Claim:
    """What the head of the queue may take from running sequences."""

    def __init__(self, head: Sequence, policy: Policy, now: float, *, shares_by_tenant: bool) -> None:
        self._head = head
        self._policy = policy
        self._now = now
        self._shares_by_tenant = shares_by_tenant
        self._rank = policy.effective_priority(head, now)
        self._debt = policy.debt(head.request.tenant, self._rank)

    def reaches(self, sequence: Sequence, held: Counter[str], num_given: int, num_gained: int) -> bool:
        """Whether a running sequence yields.

        `held` is what each tenant holds. The sequence's tenant would give up `num_given` of it, and the head's would
        gain `num_gained`.
        """
        if not sequence.is_unit_running or 0 < sequence.num_steps < MIN_STEPS:
            return False
        head, other, policy = self._head.request, sequence.request, self._policy
        if policy.outranks(self._head, sequence, self._now):
            return True
        if not self._shares_by_tenant or other.tenant == head.tenant:
            return False
        if policy.effective_priority(sequence, self._now) > self._rank:
            return False
        num_head, num_other = held[head.tenant], held[other.tenant]
        debt = policy.debt(other.tenant, self._rank)
        if debt - self._debt > TURN_TOKENS / head.weight and num_other / other.weight >= num_head / head.weight:
            return True
        # Else the sequence that yields would come back before the head.
        return debt >= self._debt and (num_other - num_given) / other.weight >= (num_head + num_gained) / head.weight


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
        """Lets running sequences yield if the head of the queue has a right to their slots or blocks.

        Returns the head if it can be admitted now. A step yields the slots that it needs, and one for each of a few
        requests of its tenant behind it.
        """
        if (not self._waiting.policy and not replica.swapped) or self._capacity.is_held(replica):
            return None
        head = self._waiting.head(replica)
        if head is None or not replica.shape.computes(head.request):
            return None
        if (head.swapped_kv is not None and head.is_leaving) or not self._may_claim(replica, head):
            return None
        self._note(replica, head)
        if self._capacity.num_missing_slots(replica, head) <= 0:
            return head if self._make_room(replica, head) else None
        victims = self._slot_victims(replica, head)
        if not victims or not self._make_room(replica, head):
            return None
        return head if all(self._take_slots(replica, victim) for victim in victims) else None

    def _note(self, replica: Replica, head: Sequence) -> None:
        """Has room kept for requests like this one, if it is a new one of a tenant with few slots."""
        if self._shares_by_tenant and not head.num_output and not replica.shape.is_without_kv(head.request):
            num_blocks = replica.shape.num_blocks_for(len(head.tokens) + 1)
            self._capacity.newcomers.note(replica, head.request.tenant, num_blocks)

    def _take_slots(self, replica: Replica, victim: Sequence) -> bool:
        has_yielded = self._preemptor.take_slot(replica, victim)
        for each in victim.unit:
            each.has_yielded = has_yielded
        return has_yielded

    def _may_claim(self, replica: Replica, head: Sequence) -> bool:
        """Whether sequences of other tenants or of lower priority run, or others keep blocks without a slot."""
        if any(sequence not in head.unit for sequence in replica.kept):
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
            if self._capacity.has_free_slot(other):
                continue
            if kept := [s for s in other.kept if self._may_be_taken(s, replica)]:
                self._preemptor.requeue(other, min(kept, key=self._waiting.rank))
                return

    def _may_be_taken(self, sequence: Sequence, replica: Replica) -> bool:
        """Whether a sequence would be admitted by a replica if it were queued."""
        if sequence.is_leaving or self._capacity.num_missing_slots(replica, sequence) > 0:
            return False
        shape = replica.shape
        return shape.computes(sequence.request) and self._waiting.accounts.may_run(sequence, shape)

    def _slot_victims(self, replica: Replica, head: Sequence) -> list[Sequence]:
        """The sequences that yield their slots; none if they have too few together."""
        if head.swapped_kv is None and any(self._may_take(other, head) for other in self._replicas):
            return []  # that replica admits it
        held: Counter[str] = Counter()
        for each in self._replicas:
            held.update(each.num_slots_of)
        claim, num_missing = self._claim(head), self._capacity.num_missing_slots(replica, head)
        num_more, num_gained = self._num_alike(head), head.request.num_slots
        victims: list[Sequence] = []
        for sequence in self._policy.victims(replica):
            num_given = min(num_missing, sequence.request.num_slots)
            if not claim.reaches(sequence, held, num_given, num_gained):
                continue
            victims.append(sequence)
            held[sequence.request.tenant] -= num_given
            num_missing -= num_given
            if not num_missing:
                if not num_more:
                    break
                num_more, num_missing, num_gained = num_more - 1, 1, num_gained + 1
        return victims if num_gained > head.request.num_slots or not num_missing else []

    def _num_alike(self, head: Sequence) -> int:
        """How many requests of the same tenant are probably admitted with the head if slots are yielded for them."""
        if head.request.num_slots > 1 or head.swapped_kv is not None or not self._shares_by_tenant:
            return 0
        num_waiting = self._waiting.admission.num_requests_of(head.request.tenant)
        return max(0, min(MAX_TOGETHER, num_waiting) - 1)

    def _claim(self, head: Sequence) -> _Claim:
        return _Claim(head, self._waiting.policy, self._waiting.now, shares_by_tenant=self._shares_by_tenant)

    def _may_take(self, replica: Replica, head: Sequence) -> bool:
        """Whether a replica has a slot and room for a queued sequence."""
        may_take = replica.admits and not replica.has_returning and replica.shape.computes(head.request)
        if not may_take or self._capacity.num_missing_slots(replica, head) > 0:
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
            claim, victims = self._claim(head), self._policy.victims(replica)
            victim = next((each for each in victims if claim.reaches(each, held, num_missing, num_missing)), None)
            if victim is None:
                break
            for each in victim.unit:
                each.has_yielded = True
            self._preemptor.preempt(replica, victim)
        return False

    def _num_missing_blocks(self, replica: Replica, head: Sequence) -> int:
        kv = replica.kv
        if replica.shape.is_without_kv(head.request):
            return 0
        if head.swapped_kv is not None:
            num_needed = self._capacity.num_needed_to_resume(replica, head)
        else:
            num_needed = kv.num_needed(head, kv.match(head))
        return num_needed + self._capacity.measured_reserve(replica, head) - kv.num_available
