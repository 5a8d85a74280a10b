"""Requests that may be what workers die of: each is tried alone, and fails only if a worker is lost to it alone."""

from collections.abc import Iterable
from weakref import WeakSet

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence

_SUSPICIOUS = 2  # replicas lost in a row while they computed a request, without a token of it in between


class Quarantine:
    """Counts losses by request, and holds the sequences of suspects that wait.

    A suspect is a request that was in flight on two replicas in a row that were lost, without a token in between. Its
    sequences wait here and not in the policy's queue. They come in before it, one at a time on each replica, where an
    idle replica is preferred; and are computed in steps of their own, beside which no other step is in flight. Between
    two such steps of a replica the others there have one of theirs, where they have anything to do. So a suspect waits
    for no more than the trials of those before it, and holds nobody up for longer than a step at a time. A token ends
    the suspicion. A replica that is lost with nothing but a suspect in flight ends the request.
    """

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}
        self._suspects: set[str] = set()
        self._waiting: dict[Sequence, None] = {}  # who came first before
        self._tried: WeakSet[Replica] = WeakSet()

    def __len__(self) -> int:
        """Sequences that wait here."""
        return len(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        """Whether a sequence waits here."""
        return sequence in self._waiting

    @property
    def has_losses(self) -> bool:
        """Whether any live request was in flight on a replica that was lost, and had no token since."""
        return bool(self._losses)

    @property
    def has_suspects(self) -> bool:
        """Whether any live request is a suspect."""
        return bool(self._suspects)

    def is_suspect(self, sequence: Sequence) -> bool:
        """Whether a sequence is one of a suspect's."""
        return sequence.request.key in self._suspects

    # Who is suspected.

    def lose(self, keys: Iterable[str]) -> str | None:
        """A replica was lost with these live requests in flight. Returns the one that is convicted by it."""
        lost = list(keys)
        if len(lost) == 1 and lost[0] in self._suspects:
            return lost[0]
        for key in lost:
            self._losses[key] = self._losses.get(key, 0) + 1
            if self._losses[key] >= _SUSPICIOUS:
                self._suspects.add(key)
        return None

    def acquit(self, key: str) -> list[Sequence]:
        """A request has another token, or is over. Returns those of its sequences that wait here, and do so no more."""
        if self._losses.pop(key, None) is None or key not in self._suspects:
            return []
        self._suspects.remove(key)
        if not self._suspects:
            self._tried.clear()
        freed = [sequence for sequence in self._waiting if sequence.request.key == key]
        for sequence in freed:
            del self._waiting[sequence]
        return freed

    # Who waits.

    def add(self, sequence: Sequence) -> None:
        """A suspect's sequence waits."""
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> bool:
        """It waits no more; False where it did not."""
        if sequence not in self._waiting:
            return False
        del self._waiting[sequence]
        return True

    def first(self, replica: Replica) -> Sequence | None:
        """Who is tried next on a replica, where none is there already."""
        if not self._waiting or any(self.is_suspect(s) for s in replica.running):
            return None
        return next(iter(self._waiting))

    def position(self, sequence: Sequence) -> int | None:
        """How many go before it; None where it does not wait here."""
        return list(self._waiting).index(sequence) if sequence in self._waiting else None

    # Whose turn it is.

    def has_turn(self, replica: Replica) -> bool:
        """Whether a suspect may have a replica's next step: the last one was none of a suspect's."""
        return replica not in self._tried

    def take_turn(self, replica: Replica, *, is_trial: bool) -> None:
        """A replica was given a step: a suspect's, or one of the others."""
        if is_trial:
            self._tried.add(replica)
        else:
            self._tried.discard(replica)
