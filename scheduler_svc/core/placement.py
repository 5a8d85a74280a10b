"""Which of several replicas a sequence goes to that waits: where it is predicted to be done first."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.replica import Hit, Replica
from scheduler_svc.core.sequence import Sequence

MAX_OTHERS = 31  # replicas beside the one that asks that are looked at for one sequence
_ALIKE = 1.25  # times; what two replicas have learnt of a step differs by so much although they are the same machine


class ReplicaLoad(NamedTuple):
    """Tokens that those who run on a replica know and have to compute, and the blocks that they need for them yet."""

    num_tokens: int = 0
    num_blocks: int = 0


class PlacementOffer(NamedTuple):
    """A replica that has room for a sequence: what is there of it, and who is about to compute what it shares, with the
    number of tokens from the start that this one does.
    """

    replica: Replica
    hit: Hit
    leader: tuple[Sequence, int] | None


class Placement:
    """Compares replicas by the seconds until a sequence would be done there, by what each has learnt of its own costs.

    These are: to compute what is not found there, or to bring it from the host; before that, to compute what those who
    run there know; and then a step for each token that it is likely to draw, beside all who run there. Among equals the
    one with the fewest who run; and replicas are equally fast that are not clearly different, or have not run long
    enough to tell. So a prefix draws a sequence to where it is, for as long as that saves more than is
    lost by being one more among many.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        """`replicas` is the owner's own list, which grows and shrinks."""
        self._replicas = replicas
        self._loads: WeakKeyDictionary[Replica, ReplicaLoad] = WeakKeyDictionary()
        self._usual: CostModel | None = None  # of the replica that asked last, of those that know their costs
        self._placed: dict[Replica, None] = {}  # that were given a sequence while another one's step was made

    @property
    def has_choice(self) -> bool:
        """Whether there are several replicas."""
        return len(self._replicas) > 1

    # How loaded replicas are.

    def measure(self, replica: Replica) -> ReplicaLoad:
        """What is to be done on a replica. O(sequences that run)."""
        num_tokens = num_blocks = 0
        size = replica.shape.block_size
        for sequence in replica.running:
            num_known = len(sequence.tokens) + sequence.num_promised
            if num_known - sequence.num_computed > 1:
                num_tokens += num_known - sequence.num_computed
                num_blocks += -(-num_known // size) - len(sequence.block_ids)
        if replica.costs.has_learnt or self._usual is None:
            self._usual = replica.costs
        load = self._loads[replica] = ReplicaLoad(num_tokens, num_blocks)
        return load

    def load(self, replica: Replica) -> ReplicaLoad:
        """The same as it was measured last, and what came since: so it may be more than there is, but never less."""
        return self._loads[replica] if replica.running and replica in self._loads else self.measure(replica)

    def note_admitted(self, replica: Replica, sequence: Sequence) -> None:
        """A sequence was let in."""
        before = self.load(replica) if len(replica.running) > 1 else ReplicaLoad()
        num_owed = replica.num_blocks_for(sequence.num_known) - len(sequence.block_ids)
        self._loads[replica] = ReplicaLoad(before.num_tokens + sequence.num_uncomputed, before.num_blocks + num_owed)

    def forget(self, replica: Replica) -> None:
        """A replica is gone."""
        self._placed.pop(replica, None)

    # Where a sequence goes.

    def note_placed(self, replica: Replica) -> None:
        """A replica was given a sequence while the step of another one was made."""
        self._placed[replica] = None

    def take_placed(self) -> list[Replica]:
        """Whom `note_placed` was told of since this was asked last."""
        placed, self._placed = list(self._placed), {}
        return placed

    def best(
        self,
        offer: PlacementOffer,
        sequence: Sequence,
        num_output: float,
        offer_of: Callable[[Replica], PlacementOffer | None],
    ) -> PlacementOffer:
        """The best of a replica's own offer and those that others make, for a sequence that is likely to draw so many
        tokens more.
        """
        offers = (other for replica in self._others(offer.replica) if (other := offer_of(replica)) is not None)
        return min(chain((offer,), offers), key=lambda each: self._rank(each, sequence, num_output))

    def for_isolated_run(self, asks: Replica) -> Replica:
        """Where a suspect is tried: on a replica that runs nothing, so that nobody else loses what it has computed."""
        if asks.is_idle:
            return asks
        return next((replica for replica in self._replicas if replica.is_idle and not replica.is_retired), asks)

    def _others(self, asks: Replica) -> Iterator[Replica]:
        """Those behind the one that asks, all round. One whose own sequences wait to come back takes nobody's."""
        place = self._replicas.index(asks)
        others = chain(islice(self._replicas, place + 1, None), islice(self._replicas, place))
        return (other for other in islice(others, MAX_OTHERS) if not other.is_retired and not other.swapped)

    def _rank(self, offer: PlacementOffer, sequence: Sequence, num_output: float) -> tuple[float, int]:
        replica = offer.replica
        num_running, num_known = len(replica.running), len(sequence.tokens)
        costs = self._costs(replica, num_running + 1)
        num_found = offer.leader[1] if offer.leader is not None else offer.hit.num_full * replica.shape.block_size
        num_found = min(num_found, num_known - 1)
        seconds = costs.recompute_seconds(self.load(replica).num_tokens)
        seconds += costs.recompute_seconds(num_known - num_found, num_found)
        if offer.hit.host_ids:
            seconds += costs.swap_seconds(0, len(offer.hit.host_ids))
        seconds += num_output * costs.step_seconds(0, num_running + 1)
        return seconds, num_running

    def _costs(self, replica: Replica, num_decodes: int) -> CostModel:
        """What to believe of a replica: its own costs where it knows them, and they are others than usual."""
        own, usual = replica.costs, self._usual
        if usual is None or own is usual:
            return own
        if not own.has_learnt:
            return usual
        seconds, usual_seconds = own.step_seconds(0, num_decodes), usual.step_seconds(0, num_decodes)
        return usual if usual_seconds / _ALIKE < seconds < usual_seconds * _ALIKE else own
