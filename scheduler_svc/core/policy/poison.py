"""Poison requests: a request that crashes every worker that computes it must not take all workers down.

A sequence is *suspected* if steps in flight named it on two replicas in a row that were lost, without a token of its
own in between; so are its siblings, since their prompt may be the cause. A suspected sequence runs isolated: in steps
of its own, with no other step in flight. It is *cleared* by a token of its own. A request fails when a replica is lost
while its steps in flight name only suspected sequences of that request.

The rest of the scheduler does not distinguish suspected sequences. This module wraps the queue (`IsolatingQueue`) and
the placement (`IsolatingPlacement`); `planning/isolated_runs.py` decides whose step is next.
"""

from collections.abc import Iterable

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.policy.order import Policy
from scheduler_svc.core.policy.placement import OfferOf, Placement, PlacementOffer
from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Phase, Sequence

_LOSSES_TO_SUSPECT = 2  # replicas lost in a row while they computed a sequence, without a token of it in between


_Subject = Sequence | str
"""What is suspected: a sequence; of a beam search, the request by its key, since sequences of beams come and go."""


class PoisonTracker:
    """Which sequences are suspected."""

    def __init__(self) -> None:
        self._losses: dict[_Subject, int] = {}
        self._suspected: set[_Subject] = set()

    @property
    def has_losses(self) -> bool:
        """Whether any sequence was in a step in flight of a lost replica, or is suspected, and had no token since."""
        return bool(self._losses or self._suspected)

    @property
    def has_suspected(self) -> bool:
        """Whether any sequence is suspected."""
        return bool(self._suspected)

    def is_suspected(self, sequence: Sequence) -> bool:
        """Whether a sequence runs isolated."""
        return bool(self._suspected) and _subject(sequence) in self._suspected

    def record_loss(self, sequences: Iterable[Sequence]) -> str | None:
        """A replica was lost whose steps in flight named these live sequences. Returns the key of the request that
        fails, if any.
        """
        lost = {_subject(sequence): sequence for sequence in sequences}
        keys = {sequence.request.key for sequence in lost.values()}
        if len(keys) == 1 and lost.keys() <= self._suspected:
            return keys.pop()
        for subject, sequence in lost.items():
            self._losses[subject] = self._losses.get(subject, 0) + 1
            if self._losses[subject] >= _LOSSES_TO_SUSPECT:
                self._suspected.update(_subject(one) for one in sequence.siblings if one.phase is not Phase.ENDED)
        return None

    def clear(self, sequence: Sequence) -> None:
        """A sequence has another token, all beams of its search have, or it has ended."""
        self._losses.pop(_subject(sequence), None)
        self._suspected.discard(_subject(sequence))


def _subject(sequence: Sequence) -> _Subject:
    return sequence if sequence.request.beam is None else sequence.request.key


class IsolatingQueue(WaitingSequences):
    """The queue, with suspected sequences apart. They are admitted before others, one at a time on each replica."""

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        poison: PoisonTracker,
        replicas: Iterable[Replica] = (),
        *,
        short_prompts_first: bool = True,
    ) -> None:
        super().__init__(policy, admission, replicas, short_prompts_first=short_prompts_first)
        self._poison = poison
        self._suspected: dict[Sequence, None] = {}  # in the order of their arrival here

    def __len__(self) -> int:
        return super().__len__() + len(self._suspected)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        if not self._poison.is_suspected(sequence):
            super().add(sequence)
            return
        if sequence.phase is not Phase.QUEUED:
            sequence.set_phase(Phase.QUEUED)
        self.admission.enter(sequence.request)
        self._suspected[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue."""
        if sequence in self._suspected:
            del self._suspected[sequence]
        else:
            super().remove(sequence)

    def num_ahead(self, sequence: Sequence, num_swapped: int, now: float) -> int:
        """How many sequences are admitted or resumed before a queued one; for a suspected one, suspected ones."""
        if sequence in self._suspected:
            return list(self._suspected).index(sequence)
        return super().num_ahead(sequence, num_swapped, now)

    def head(self, replica: Replica) -> Sequence | None:
        """The sequence that a replica admits or resumes next: a suspected one before others."""
        if not self._suspected or not replica.admits or replica.isolated:
            return super().head(replica)
        suspected = (each for each in self._suspected if self.accounts.may_run(each, replica.shape))
        return next(suspected, None) or super().head(replica)

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """Sets those apart that are queued and suspected now."""
        for sequence in sequences:
            is_misplaced = self._poison.is_suspected(sequence) and sequence not in self._suspected
            if sequence.phase is Phase.QUEUED and is_misplaced:
                self.remove(sequence)
                self.add(sequence)


class IsolatingPlacement(Placement):
    """The placement, which places suspected sequences on idle replicas if there are any."""

    def __init__(self, replicas: list[Replica], poison: PoisonTracker) -> None:
        super().__init__(replicas)
        self._poison = poison

    def choose(self, asks: Replica, sequence: Sequence, num_output: float, offer_of: OfferOf) -> PlacementOffer | None:
        """The best offer. A suspected sequence waits for no other one's prefix."""
        if not self._poison.is_suspected(sequence):
            return super().choose(asks, sequence, num_output, offer_of)
        offer = offer_of(self._idle_replica(asks, sequence))
        return offer._replace(is_isolated=True) if offer is not None and offer.has_room else None

    def _idle_replica(self, asks: Replica, sequence: Sequence) -> Replica:
        """An idle replica, whose loss would cost no other sequence anything; else the one that asks."""
        if asks.is_idle:
            return asks
        computing = (replica for replica in self._replicas if replica.shape.computes(sequence.request))
        return next((replica for replica in computing if replica.is_idle and replica.admits), asks)
