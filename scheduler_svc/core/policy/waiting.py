"""The sequences that wait for a replica: in the policy's queue, or for a prefix that another sequence computes."""

from collections.abc import Iterable

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.policy.account_gate import AccountGate
from scheduler_svc.core.policy.order import Policy
from scheduler_svc.core.policy.prefix_waiters import PrefixWaiters
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence


class WaitingSequences:
    """Sequences that hold no blocks. Swapped sequences wait on their replica instead."""

    def __init__(self, policy: Policy, admission: Admission, replicas: Iterable[Replica] = ()) -> None:
        """`replicas` is the owner's own list, which grows and shrinks."""
        self.policy = policy
        self.accounts = AccountGate(policy, replicas)
        self.admission = admission
        self.prefix_waiters = PrefixWaiters()
        self.now = 0.0  # the driver's clock, as of its last call

    def __len__(self) -> int:
        return len(self.policy) + len(self.accounts) + len(self.prefix_waiters)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence with all its known tokens."""
        if sequence.phase is not Phase.QUEUED:
            sequence.set_phase(Phase.QUEUED)
        self.admission.enter(sequence.request)
        self.accounts.add(sequence, self.now)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue."""
        self.accounts.remove(sequence)

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
        with which all others are resumed. Sequences whose accounts have no room for them are passed over.
        """
        queued = self.accounts.first(self.now, replica.shape) if replica.admits else None
        resumable = [s for s in replica.swapped if self.accounts.may_run(s, replica.shape)]
        if not resumable:
            return queued
        swapped = min(resumable, key=lambda s: (self.rank(s), s.arrival, s.index))
        swapped.start_waiting(self.now)  # it did not while its account could not pay for it
        return queued if queued is not None and self._goes_first(queued, swapped) else swapped

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
