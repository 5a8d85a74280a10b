"""Takes slots and blocks from running sequences for a waiting one of a higher class or of a tenant that holds less.

`claim.py` says which sequences yield to the head of the queue. If none does, the head waits until slots are free, and
what yields to another tenant behind it, of a larger weight or with fewer slots, is that one's.

Blocks of sequences that yield slots stay on the device while no block is short.
A beam search takes and yields the slots of all its beams together. If that is more than the head lacks, its tenant
counts as if it gave up only so many.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.claim import Claim
from scheduler_svc.core.planning.preemptor import Preemptor
from scheduler_svc.core.policy.preemption import PreemptionPolicy
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

MAX_TOGETHER = 4  # requests for which slots are yielded in one step
MAX_TENANTS = 16  # whose claims a step looks at where the head of the queue has none


@dataclass(frozen=True, slots=True)
class _Share:
    """What claims on slots depend on: nothing yields to a request that is no stronger than one without a claim."""

    priority: int
    now: float
    after: float
    """Slots of the tenant over its weight, now and with this request."""

    def is_stronger(self, other: "_Share") -> bool:
        return self.priority > other.priority or self.now < other.now or self.after < other.after


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
        requests of its tenant behind it. If it lacks slots and has a right to none, the first request behind it that
        has is put first.
        """
        if (not self._waiting.policy and not replica.swapped) or self._capacity.is_held(replica):
            return None
        head = self._head(replica)
        if head is None or not replica.shape.computes(head.request):
            return None
        if head.swapped_kv is not None and head.is_leaving:
            return None
        if not self._may_claim(replica, head):
            return self._make_way_behind(replica, head)
        if not self._lacks_slots(replica, head):
            num_kept = self._capacity.for_new_requests.left_by_all(replica)
            if self._num_missing_blocks(replica, head) + num_kept <= 0:
                return head
            self._note(replica, head)  # it lacks blocks, or would without those that are kept free for such requests
            return head if self._make_room(replica, head) else None
        if self._is_admitted_elsewhere(head):
            return None
        if victims := self._slot_victims(replica, head, self._num_alike(head)):
            return head if self._take(replica, head, victims) else None
        return self._make_way_behind(replica, head)

    def _head(self, replica: Replica) -> Sequence | None:
        """The head of the queue. One that was put first is no longer so if others took the slots meanwhile."""
        head = self._waiting.head(replica)
        if head is not None and self._waiting.is_put_first(replica) and self._lacks_slots(replica, head):
            self._waiting.put_back(replica)
            head = self._waiting.head(replica)
        return head

    def _make_way_behind(self, replica: Replica, head: Sequence) -> Sequence | None:
        """The first request of another tenant that has a right to slots, if it can be admitted now.

        Free slots are the head's, which needs more.
        """
        if not self._shares_by_tenant or not self._lacks_slots(replica, head):
            return None
        held = self._held_slots()
        passed = [_share(head, held)]
        for other in islice(self._waiting.next_tenants(replica), MAX_TENANTS):
            share = _share(other, held)
            if other.request.tenant == head.request.tenant or not all(share.is_stronger(each) for each in passed):
                continue
            passed.append(share)
            is_able = replica.shape.computes(other.request) and self._lacks_slots(replica, other)
            if not is_able or self._is_admitted_elsewhere(other):
                continue
            if victims := self._slot_victims(replica, other, 0):
                break
        else:
            return None
        if not self._take(replica, other, victims):
            return None
        self._waiting.put_first(replica, other)
        return other

    def _lacks_slots(self, replica: Replica, sequence: Sequence) -> bool:
        return self._capacity.num_missing_slots(replica, sequence) > 0

    def _take(self, replica: Replica, head: Sequence, victims: list[Sequence]) -> bool:
        """Takes the slots of victims, once there is room; whether a waiting sequence can be admitted now."""
        self._note(replica, head)
        return self._make_room(replica, head) and all(self._take_slots(replica, victim) for victim in victims)

    def _note(self, replica: Replica, head: Sequence) -> None:
        """Keeps blocks free for requests like this one, which lacks slots or blocks, if it is a new one."""
        if self._shares_by_tenant and not head.num_output and not replica.shape.is_without_kv(head.request):
            num_blocks = replica.shape.num_blocks_for(len(head.tokens) + 1)
            self._capacity.for_new_requests.note(replica, head, num_blocks)

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

    def _is_admitted_elsewhere(self, head: Sequence) -> bool:
        """Whether another replica has a slot and room for a queued sequence."""
        return head.swapped_kv is None and any(self._may_take(other, head) for other in self._replicas)

    def _held_slots(self) -> Counter[str]:
        """Slots of each tenant on all replicas."""
        held: Counter[str] = Counter()
        for each in self._replicas:
            held.update(each.num_slots_of)
        return held

    def _slot_victims(self, replica: Replica, head: Sequence, num_more: int) -> list[Sequence]:
        """The sequences that yield their slots; none if they have too few together.

        They yield one for each of up to `num_more` requests besides.
        """
        held = self._held_slots()
        claim, num_missing = self._claim(head), self._capacity.num_missing_slots(replica, head)
        num_gained = head.request.num_slots
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

    def _claim(self, head: Sequence) -> Claim:
        return Claim(head, self._waiting.policy, self._waiting.now, shares_by_tenant=self._shares_by_tenant)

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


def _share(sequence: Sequence, held: Counter[str]) -> _Share:
    request = sequence.request
    num_held = held[request.tenant]
    return _Share(request.priority, num_held / request.weight, (num_held + request.num_slots) / request.weight)
