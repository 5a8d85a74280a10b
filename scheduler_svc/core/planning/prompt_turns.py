"""Whose prompt is computed next on a replica: classes in order, and within a class tenants by turns."""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence


class PromptTurns:
    """Counts the prompt tokens that each tenant's running prompts were given in steps, by weight.

    The tenant with the smallest count is next. One whose first prompt starts begins at the smallest count, so it waits
    for one turn of each other tenant at most. Of a tenant's prompts in a class, the one whose first token is due first
    is next, or the one whose deadline is before that.
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
        rank, now = self._waiting.policy.effective_priority, self._waiting.now
        return sorted(
            prompts, key=lambda s: (-rank(s, now), counts[s.request.tenant], s.request.due_by(s.first_token_due))
        )

    def goes_before(self, head: Sequence, running: Sequence, replica: Replica) -> bool:
        """Whether a queued sequence is computed before a prompt that runs on a replica.

        It is of the same tenant and of no lower class, its first token is due before, and it takes less time than the
        rest of the running prompt. One that runs and has a deadline waits for none.
        """
        if not self._shares_by_tenant or head.request.tenant != running.request.tenant:
            return False
        if running.request.deadline is not None or head.first_token_due >= running.first_token_due:
            return False
        if head.phase is not Phase.QUEUED or replica.shape.is_indivisible(head.request):
            return False
        rank, now = self._waiting.policy.effective_priority, self._waiting.now
        if rank(head, now) < rank(running, now):
            return False
        left = replica.costs.recompute_seconds(running.num_uncomputed, running.num_computed)
        return replica.prompt_seconds(head) < left

    def charge(self, replica: Replica, sequence: Sequence, num_tokens: int) -> None:
        """A step computes so many tokens of a prompt."""
        counts = self._counts.get(replica)
        if counts is not None:
            counts[sequence.request.tenant] += num_tokens / sequence.request.weight

    def num_left_to(self, head: Sequence, prompts: Seq[Sequence], budget: int) -> int:
        """Tokens of a step's budget that running prompts leave to a sequence that can be admitted now.

        Up to half of them if its tenant has no running prompt, or its class is higher than those of all running ones.
        """
        if not prompts:
            return 0
        is_new = self._shares_by_tenant and all(s.request.tenant != head.request.tenant for s in prompts)
        outranks, now = self._waiting.policy.outranks, self._waiting.now
        is_higher = all(outranks(head, sequence, now) for sequence in prompts)
        num_uncomputed = head.num_known - (head.swapped_kv.num_tokens if head.swapped_kv is not None else 0)
        return min(num_uncomputed, budget // 2) if is_new or is_higher else 0
