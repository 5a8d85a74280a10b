"""Requests that may be what workers die of: each is tried alone, and fails only if a worker is lost to it alone."""

from collections.abc import Iterable
from weakref import WeakSet

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Phase, Sequence

_LOSSES_TO_SUSPECT = 2  # replicas lost in a row while they computed a sequence, without a token of it in between


class Quarantine:
    """Counts losses by sequence, and holds suspects that wait.

    A sequence that was in flight on two replicas in a row that were lost, without a token of its own in between, brings
    suspicion upon its request: all sequences of this that are live are suspects, since it may be their prompt. Suspects
    wait here and not in the policy's queue. They come in before it, one at a time on each replica, where an idle
    replica is preferred; and are computed in steps of their own, beside which no other step is in flight. Between two
    such steps of a replica the others there have one of theirs, where they have anything to do. So a suspect waits for
    no more than the trials of those before it, and holds nobody up for longer than a step at a time. A token clears the
    sequence that drew it, but none of its siblings: it may be one of them alone that workers die of. A replica that is
    lost with nothing but suspects of one request in flight ends that request.
    """

    def __init__(self) -> None:
        self._losses: dict[Sequence, int] = {}
        self._suspected: set[Sequence] = set()
        self._waiting: dict[Sequence, None] = {}  # who came first before
        self._ran_isolated: WeakSet[Replica] = WeakSet()

    def __len__(self) -> int:
        """Sequences that wait here."""
        return len(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        """Whether a sequence waits here."""
        return sequence in self._waiting

    @property
    def has_losses(self) -> bool:
        """Whether any sequence was in flight on a replica that was lost, or is a suspect, and had no token since."""
        return bool(self._losses or self._suspected)

    @property
    def has_suspected(self) -> bool:
        """Whether there are suspects."""
        return bool(self._suspected)

    def is_suspected(self, sequence: Sequence) -> bool:
        """Whether a sequence is tried alone."""
        return sequence in self._suspected

    # Who is suspected.

    def record_loss(self, in_flight: Iterable[Sequence]) -> str | None:
        """A replica was lost with these live sequences in flight. Returns the key of a request convicted by it."""
        lost = set(in_flight)
        keys = {sequence.request.key for sequence in lost}
        if len(keys) == 1 and lost <= self._suspected:
            return keys.pop()
        for sequence in lost:
            self._losses[sequence] = self._losses.get(sequence, 0) + 1
            if self._losses[sequence] >= _LOSSES_TO_SUSPECT:
                self._suspected.update(one for one in sequence.siblings if one.phase is not Phase.ENDED)
        return None

    def clear(self, sequence: Sequence) -> None:
        """A sequence has another token, or is over."""
        self._losses.pop(sequence, None)
        if sequence in self._suspected:
            self._suspected.remove(sequence)
            if not self._suspected:
                self._ran_isolated.clear()

    # Who waits.

    def add(self, sequence: Sequence) -> None:
        """A suspect waits."""
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> bool:
        """It waits no more; False where it did not."""
        if sequence not in self._waiting:
            return False
        del self._waiting[sequence]
        return True

    def first(self, replica: Replica) -> Sequence | None:
        """Who is tried next on a replica, where none is there already."""
        if not self._waiting or any(self.is_suspected(s) for s in replica.running):
            return None
        return next(iter(self._waiting))

    def position(self, sequence: Sequence) -> int | None:
        """How many go before it; None where it does not wait here."""
        return list(self._waiting).index(sequence) if sequence in self._waiting else None

    # Whose turn it is.

    def may_run_isolated(self, replica: Replica) -> bool:
        """Whether a suspect may have a replica's next step: the last one was no suspect's."""
        return replica not in self._ran_isolated

    def note_step(self, replica: Replica, *, is_isolated: bool) -> None:
        """A replica was given a step: a suspect's, or one of the others."""
        if is_isolated:
            self._ran_isolated.add(replica)
        else:
            self._ran_isolated.discard(replica)
