"""Predicts how long a request waits for a sequence slot."""

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.planning.capacity import Capacity
from scheduler_svc.core.planning.claim import Claim
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence


class SlotWait:
    """Until a slot is free, a running sequence usually ends, or one yields its slot (`claim.py`)."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        waiting: WaitingSequences,
        capacity: Capacity,
        lengths: OutputLengths,
        *,
        shares_by_tenant: bool,
    ) -> None:
        """`replicas` is the owner's own list."""
        self._replicas = replicas
        self._waiting = waiting
        self._capacity = capacity
        self._lengths = lengths
        self._shares_by_tenant = shares_by_tenant

    def seconds(self, request: Request) -> float:
        """Seconds until a slot is there for a request, or for the requests of its tenant that go before it.

        O(sequences that run).
        """
        working = [replica for replica in self._replicas if replica.admits]
        if any(self._has_slot(replica) for replica in working):
            return 0.0
        held: Counter[str] = Counter()
        for each in self._replicas:
            held.update(each.num_slots_of)
        head = Sequence(-1, request, 0, 0, request.prompt)
        claim = Claim(head, self._waiting.policy, self._waiting.now, shares_by_tenant=self._shares_by_tenant)
        return min((self._seconds_on(replica, claim, held) for replica in working), default=0.0)

    def _has_slot(self, replica: Replica) -> bool:
        return self._capacity.has_free_slot(replica) and not replica.swapped

    def _seconds_on(self, replica: Replica, claim: Claim, held: Counter[str]) -> float:
        num_steps = min((self._steps_until(sequence, claim, held) for sequence in replica.running), default=0.0)
        return num_steps * replica.costs.step_seconds(0, len(replica.running))

    def _steps_until(self, sequence: Sequence, claim: Claim, held: Counter[str]) -> float:
        """Steps until a running sequence ends or yields. In a step each slot of its tenant gets about one token."""
        num_left = max(1.0, self._lengths.expected(sequence.request) - sequence.num_output)
        num_tokens = claim.tokens_until(sequence, held, 1, 1)
        if num_tokens is None:
            return num_left
        return min(num_left, max(claim.steps_until(sequence), num_tokens / held[sequence.request.tenant]))
