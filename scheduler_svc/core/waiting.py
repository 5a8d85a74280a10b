"""The sequences that wait for a replica: in the policy's queue, behind another sequence, or set apart."""

from collections.abc import Iterable

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.prefix_waiters import PrefixWaiters
from scheduler_svc.core.quarantine import Quarantine
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Sequence


class WaitingSequences:
    """Who waits, and who of them goes first. Swapped sequences are not here: they wait on their replica."""

    def __init__(self, policy: Policy, admission: Admission) -> None:
        self.policy = policy
        self.admission = admission
        self.prefix_waiters = PrefixWaiters()
        self.quarantine = Quarantine()
        self._awaited: dict[int, Sequence] = {}  # by id, beams whose siblings hold blocks and wait for them

    def __len__(self) -> int:
        return len(self.policy) + len(self.prefix_waiters) + len(self._awaited) + len(self.quarantine)

    def add(self, sequence: Sequence, now: float) -> None:
        """It holds no blocks, and waits with all its tokens."""
        if sequence.phase is not Phase.QUEUED:
            sequence.set_phase(Phase.QUEUED)
        self.admission.enter(sequence.request)
        if self.quarantine.is_suspected(sequence):
            self.quarantine.add(sequence)
        elif sequence.is_one_of_beams:
            self._awaited[sequence.id] = sequence
        else:
            self.policy.add(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more, or not in the queue."""
        if self._awaited.pop(sequence.id, None) is None and not self.quarantine.remove(sequence):
            self.policy.remove(sequence)

    def head(self, replica: Replica, now: float) -> Sequence | None:
        """Who comes in next: beams that others wait for, then a suspect, if none is tried here; then those who ran here
        before others of their class. On a replica that is retired, only these, and beams that others wait for there.
        """
        if (beam := self._first_awaited(replica)) is not None:
            return beam
        if not replica.is_retired and (suspected := self.quarantine.first(replica)) is not None:
            return suspected
        queued = self.policy.first(now) if not replica.is_retired else None
        if not replica.swapped:
            return queued
        rank = self.policy.effective_priority
        swapped = max(replica.swapped, key=lambda s: (rank(s, now), -s.arrival, -s.index))
        return queued if queued is not None and rank(queued, now) > rank(swapped, now) else swapped

    def _first_awaited(self, replica: Replica) -> Sequence | None:
        """The first beam that others wait for. On a replica that is retired, others there: it keeps these only while no
        other replica takes work, and then they could not end without it.
        """
        for beam in self._awaited.values():
            if not replica.is_retired or any(s in replica.running or s in replica.swapped for s in beam.siblings):
                return beam
        return None

    def isolate_suspected(self, sequences: Iterable[Sequence], now: float) -> None:
        """Those of a request's sequences that are in the queue leave it, if they are suspects now."""
        for sequence in sequences:
            is_misplaced = self.quarantine.is_suspected(sequence) and sequence not in self.quarantine
            if sequence.phase is Phase.QUEUED and is_misplaced:
                self.remove(sequence)
                self.add(sequence, now)

    def wait_for_prefix(self, leader: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Let a sequence wait until the first tokens of another one are computed, which it shares."""
        sequence.set_phase(Phase.WAITING_FOR_PREFIX)
        self.prefix_waiters.add(leader, num_tokens, sequence)

    def release_ready(self, leader: Sequence, now: float) -> None:
        """A leader got further: those who need wait no longer for it queue."""
        if self.prefix_waiters.has_waiters(leader):
            for follower in self.prefix_waiters.take_ready(leader):
                self.add(follower, now)

    def release_all(self, leader: Sequence, now: float) -> None:
        """A leader computes no further for now: those who wait for it see for themselves."""
        for follower in self.prefix_waiters.take_all(leader):
            self.add(follower, now)
