"""Whose prompt is computed next on a replica: classes in order, and within a class tenants by turns."""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence


class PromptTurns:
    """Counts the prompt tokens that each tenant's running prompts were given in steps, by weight.

    The tenant with the smallest count is next. One whose first prompt starts begins at the smallest count, so it waits
    for one turn of each other tenant at most. Of a tenant's prompts in a class the one that is due first is next.
    """

    def __init__(self, waiting: WaitingSequences, *, shares_by_tenant: bool) -> None:
        """Without `shares_by_tenant` the order is always that of `Sequence.order`."""
        self._waiting = waiting
        self._shares_by_tenant = shares_by_tenant
        self._counts: WeakKeyDictionary[Replica, dict[str, float]] = WeakKeyDictionary()

    def order(self, replica: Replica, prompts: Seq[Sequence]) -> Seq[Sequence]:
        """Running prompts in the order in which a step computes them."""
        if len(prompts) < 2 or not self._shares_by_tenant:
            self._counts.pop(replica, None)
            return prompts
        tenants = {sequence.request.tenant for sequence in prompts}
        known = self._counts.get(replica, {})
        least = min((known[tenant] for tenant in tenants if tenant in known), default=0.0)
        counts = self._counts[replica] = {tenant: known.get(tenant, least) for tenant in tenants}
        return sorted(prompts, key=lambda s: (self._rank(s), counts[s.request.tenant], self._waiting.urgency(s)))

    def charge(self, replica: Replica, sequence: Sequence, num_tokens: int) -> None:
        """A step computes so many tokens of a prompt."""
        counts = self._counts.get(replica)
        if counts is not None:
            counts[sequence.request.tenant] += num_tokens / sequence.request.weight

    def num_left_to(self, head: Sequence, replica: Replica, prompts: Seq[Sequence], budget: int) -> int:
        """Tokens of a step's budget that running prompts leave to a sequence that can be admitted now.

        All that it needs if it precedes all of them in the order of its tenant. Up to half of them if its tenant has no
        running prompt, or its class is higher than those of all running ones. None if it will wait for a prefix.
        """
        if not prompts:
            return 0
        tenant, outranks, now = head.request.tenant, self._waiting.policy.outranks, self._waiting.now
        is_new = self._shares_by_tenant and all(s.request.tenant != tenant for s in prompts)
        is_higher = all(outranks(head, sequence, now) for sequence in prompts)
        precedes = self._shares_by_tenant and all(
            s.request.tenant == tenant and self._precedes(head, s) for s in prompts
        )
        if not (is_new or is_higher or precedes):
            return 0
        return min(self._num_to_compute(head, replica), budget if precedes else budget // 2)

    def _num_to_compute(self, head: Sequence, replica: Replica) -> int:
        """Tokens that a replica computes of a sequence once it has admitted it."""
        if head.swapped_kv is not None:
            return head.num_known - head.swapped_kv.num_tokens
        hit = replica.kv.match(head)
        pending = hit.pending_prefix
        if pending is not None and not self._waiting.policy.outranks(head, pending.producer, self._waiting.now):
            return 0
        return max(1, head.num_known - hit.num_full * replica.shape.block_size)

    def _precedes(self, one: Sequence, other: Sequence) -> bool:
        """Of two sequences of a tenant in the same class."""
        return self._rank(one) == self._rank(other) and self._waiting.urgency(one) < self._waiting.urgency(other)

    def _rank(self, sequence: Sequence) -> int:
        return -self._waiting.policy.effective_priority(sequence, self._waiting.now)
