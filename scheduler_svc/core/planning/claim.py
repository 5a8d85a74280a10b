"""What a waiting request may take from running sequences.

A running sequence yields its slot or blocks if

- the waiting one outranks it: it has a higher priority, or
- its tenant is another one that has been served at least as much in the class of the waiting one, and that still holds
  no less than that one's tenant after the change, by weight; or that holds no less now and has been served
  `TURN_TOKENS` more.

It has then run for MIN_STEPS steps since it was admitted, or for none.
"""

from collections import Counter

from scheduler_svc.core.policy.order import Policy
from scheduler_svc.core.policy.preemption import MIN_STEPS
from scheduler_svc.core.request import Sequence

TURN_TOKENS = 64  # weighted tokens that a tenant may be ahead of one that waits, when both hold about the same


class Claim:
    """What the head of the queue, or a request as if it were the head, may take from running sequences."""

    def __init__(self, head: Sequence, policy: Policy, now: float, *, shares_by_tenant: bool) -> None:
        """Without `shares_by_tenant` only lower classes yield."""
        self._head = head
        self._policy = policy
        self._now = now
        self._shares_by_tenant = shares_by_tenant
        self._rank = policy.effective_priority(head, now)
        self._debt = policy.debt(head.request.tenant, self._rank)

    def reaches(self, sequence: Sequence, held: Counter[str], num_given: int, num_gained: int) -> bool:
        """Whether a running sequence yields now.

        `held` is what each tenant holds. The sequence's tenant would give up `num_given` of it, and the head's would
        gain `num_gained`.
        """
        if not sequence.is_unit_running or self.steps_until(sequence):
            return False
        return self.tokens_until(sequence, held, num_given, num_gained) == 0.0

    def steps_until(self, sequence: Sequence) -> int:
        """Steps that a running sequence has before it may yield."""
        return MIN_STEPS - sequence.num_steps if 0 < sequence.num_steps < MIN_STEPS else 0

    def tokens_until(self, sequence: Sequence, held: Counter[str], num_given: int, num_gained: int) -> float | None:
        """Tokens that the tenant of a running sequence receives before the sequence must yield; None if it need not."""
        head, other, policy = self._head.request, sequence.request, self._policy
        if policy.outranks(self._head, sequence, self._now):
            return 0.0
        if not self._shares_by_tenant or other.tenant == head.tenant:
            return None
        if policy.effective_priority(sequence, self._now) > self._rank:
            return None
        num_head, num_other = held[head.tenant], held[other.tenant]
        # Else the sequence that yields would come back before the head.
        if (num_other - num_given) / other.weight >= (num_head + num_gained) / head.weight:
            most = self._debt
        elif num_other / other.weight >= num_head / head.weight:
            most = self._debt + TURN_TOKENS / head.weight
        else:
            return None
        return max(0.0, most - policy.debt(other.tenant, self._rank)) * other.weight
