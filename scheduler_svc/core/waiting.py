"""The sequences that wait for a replica: in the policy's queue, or behind another sequence."""

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.followers import Followers
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Sequence


class Waiting:
    """Who waits, and who of them goes first. Swapped sequences are not here: they wait on their replica."""

    def __init__(self, policy: Policy, admission: Admission) -> None:
        self.policy = policy
        self.admission = admission
        self.followers = Followers()
        self._awaited: dict[int, Sequence] = {}  # by id, beams whose siblings hold blocks and wait for them

    def __len__(self) -> int:
        return len(self.policy) + len(self.followers) + len(self._awaited)

    def add(self, sequence: Sequence, now: float) -> None:
        """It holds no blocks, and waits with all its tokens."""
        if sequence.phase is not Phase.QUEUED:
            sequence.move(Phase.QUEUED)
        self.admission.enter(sequence.request)
        if sequence.is_one_of_beams:
            self._awaited[sequence.id] = sequence
        else:
            self.policy.add(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more, or not in the queue."""
        if self._awaited.pop(sequence.id, None) is None:
            self.policy.remove(sequence)

    def head(self, replica: Replica, now: float) -> Sequence | None:
        """Who comes in next: beams that others wait for, then those who ran here before others of their class."""
        for beam in self._awaited.values():
            return beam
        queued = self.policy.first(now)
        if not replica.swapped:
            return queued
        rank = self.policy.effective_priority
        swapped = max(replica.swapped, key=lambda s: (rank(s, now), -s.arrival, -s.index))
        return queued if queued is not None and rank(queued, now) > rank(swapped, now) else swapped

    def follow(self, leader: Sequence, num_tokens: int, sequence: Sequence) -> None:
        """Let a sequence wait until the first tokens of another one are computed, which it shares."""
        sequence.move(Phase.FOLLOWING)
        self.followers.add(leader, num_tokens, sequence)

    def free_ready(self, leader: Sequence, now: float) -> None:
        """A leader got further: those who need wait no longer for it queue."""
        if self.followers.leads(leader):
            for follower in self.followers.take_ready(leader):
                self.add(follower, now)

    def free_all(self, leader: Sequence, now: float) -> None:
        """A leader computes no further for now: those who wait for it see for themselves."""
        for follower in self.followers.take_all(leader):
            self.add(follower, now)
