"""The sequences that wait for a replica: in the policy's queue, or for a prefix that another sequence computes."""

from collections.abc import Iterable, Iterator
from itertools import islice

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.policy.account_gate import AccountGate
from scheduler_svc.core.policy.order import Policy, TenantTurns
from scheduler_svc.core.policy.prefix_waiters import PrefixWaiters
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence

_MOST_REPLICAS = 32  # that are asked how long a prompt takes


class WaitingSequences:
    """Sequences that hold no blocks. Swapped sequences wait on their replica instead."""

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        replicas: Iterable[Replica] = (),
        *,
        short_prompts_first: bool = True,
    ) -> None:
        """`replicas` is the owner's own list, which grows and shrinks.

        Without `short_prompts_first`, or where tenants take no turns, first tokens are due when their requests arrive.
        """
        self.policy = policy
        self.accounts = AccountGate(policy, replicas)
        self.admission = admission
        self.prefix_waiters = PrefixWaiters()
        self.now = 0.0  # the driver's clock, as of its last call
        self._replicas = replicas
        self._predicts_prompts = short_prompts_first and isinstance(policy, TenantTurns)
        self._seconds_per_token = 0.0  # of the last prompt whose time was predicted
        self._turns = policy if isinstance(policy, TenantTurns) else None
        self._put_first: dict[Replica, Sequence] = {}

    def __len__(self) -> int:
        return len(self.policy) + len(self.accounts) + len(self.prefix_waiters)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with all its known tokens."""
        if sequence.phase is not Phase.QUEUED:
            sequence.set_phase(Phase.QUEUED)
        self.admission.enter(sequence.request)
        if self._predicts_prompts:
            sequence.prompt_seconds = self._prompt_seconds(sequence)
        self.accounts.add(sequence, self.now)

    def _prompt_seconds(self, sequence: Sequence) -> float:
        """How long the prompt of a sequence takes alone, on the replica where that is shortest.

        Without a replica that computes it, each token counts as the ones before it did.
        """
        if sequence.index:
            return 0.0  # the prompt was computed for the first one of its siblings
        able = (each for each in self._replicas if each.admits and each.shape.computes(sequence.request))
        seconds = [each.prompt_seconds(sequence) for each in islice(able, _MOST_REPLICAS)]
        if not seconds:
            return len(sequence.tokens) * self._seconds_per_token
        self._seconds_per_token = max(seconds) / len(sequence.tokens)
        return min(seconds)

    def num_for(self, replica: Replica) -> float:
        """Queued sequences for each replica that admits some; 0 for one that does not."""
        return len(self.policy) / sum(each.admits for each in self._replicas) if replica.admits else 0.0

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue."""
        for replica in [replica for replica, first in self._put_first.items() if first is sequence]:
            del self._put_first[replica]
        self.accounts.remove(sequence)

    def leave_admission(self, sequence: Sequence) -> None:
        """A sequence waits no more. Unless another one of its request does, nor does the request."""
        waiting = (Phase.QUEUED, Phase.WAITING_FOR_PREFIX)
        if not any(sibling is not sequence and sibling.phase in waiting for sibling in sequence.siblings):
            self.admission.leave(sequence.request)

    def num_ahead(self, sequence: Sequence, num_swapped: int, now: float) -> int:
        """How many sequences are admitted or resumed before a queued one.

        `num_swapped` sequences of its class or a higher one are swapped out.
        """
        num_held = self.accounts.num_ahead(sequence)
        return num_swapped + (self.policy.position(sequence, now) if num_held is None else num_held)

    def head(self, replica: Replica) -> Sequence | None:
        """The sequence that a replica admits or resumes next.

        It is the sequence that the policy names, or a sequence swapped out here if neither its class is lower nor its
        tenant's debt larger. A replica that does not admit takes only the latter. A search waits as one of its beams,
        with which all others are resumed. Sequences whose accounts have no room for them are passed over. One that was
        put first goes before all.
        """
        put_first = self._put_first.get(replica)
        if put_first is not None:
            if replica.admits and self.accounts.may_go(put_first, replica.shape):
                return put_first
            del self._put_first[replica]
        queued = self.accounts.first(self.now, replica.shape) if replica.admits else None
        resumable = [s for s in replica.swapped if self.accounts.may_run(s, replica.shape)]
        if not resumable:
            return queued
        swapped = min(resumable, key=lambda s: (self.rank(s), s.arrival, s.index))
        swapped.start_waiting(self.now)  # it did not while its account could not pay for it
        return queued if queued is not None and self._goes_first(queued, swapped) else swapped

    def next_tenants(self, replica: Replica) -> Iterator[Sequence]:
        """The sequences that a replica admits next of each tenant, in the order of the tenants' turns, the head's
        tenant included; none where tenants take no turns. The queue must not change meanwhile.
        """
        if self._turns is not None and replica.admits:
            for sequence in self._turns.turns(self.now):
                if self.accounts.may_go(sequence, replica.shape):
                    yield sequence

    def put_first(self, replica: Replica, sequence: Sequence) -> None:
        """Has a replica admit a queued sequence next: what it needs has been taken for it."""
        self._put_first[replica] = sequence

    def is_put_first(self, replica: Replica) -> bool:
        """Whether a sequence was put first, and still is."""
        return replica in self._put_first

    def put_back(self, replica: Replica) -> None:
        """Undoes the last `put_first`."""
        self._put_first.pop(replica, None)

    def _goes_first(self, queued: Sequence, swapped: Sequence) -> bool:
        """Of equals the swapped one is first, unless it may have yielded to the queued one."""
        ranks = self.rank(queued), self.rank(swapped)
        if ranks[0] != ranks[1]:
            return ranks[0] < ranks[1]
        one, other = queued.request, swapped.request
        return swapped.has_yielded and (one.tenant != other.tenant or one.priority > other.priority)

    def rank(self, sequence: Sequence) -> tuple[int, float]:
        """Its class, negated, and its tenant's debt: of swapped and queued sequences the smallest is first."""
        return (-self.policy.effective_priority(sequence, self.now), self.policy.preemption_key(sequence)[1])

    def wait_for_prefix(self, producer: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Has a sequence wait until the first `num_tokens` tokens of another one, which it shares, are computed."""
        sequence.set_phase(Phase.WAITING_FOR_PREFIX)
        self.prefix_waiters.add(producer, num_tokens, sequence)

    def release_ready(self, producer: Sequence) -> None:
        """Queues the sequences for which this one has computed enough."""
        if self.prefix_waiters.has_waiters(producer):
            for sequence in self.prefix_waiters.take_ready(producer):
                self.add(sequence)

    def release_all(self, producer: Sequence) -> None:
        """Queues all sequences that wait for this one, since it computes no more for now."""
        for sequence in self.prefix_waiters.take_all(producer):
            self.add(sequence)
