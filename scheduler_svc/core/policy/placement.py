"""Which of several replicas a waiting sequence goes to: the one that is predicted to end it first."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.core.costs import CostModel
from scheduler_svc.core.kv.prefix_cache import Hit, PendingPrefix
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

MAX_OTHERS = 31  # other replicas that are compared for one sequence
_ALIKE = 1.25  # step times of replicas on equal machines differ by up to this factor


class ReplicaLoad(NamedTuple):
    """Known tokens that a replica has still to compute, and the blocks still to be allocated for them."""

    num_tokens: int = 0
    num_blocks: int = 0


class PlacementOffer(NamedTuple):
    """What a replica with a free slot has for a sequence: cached blocks, and whether there is room for the rest."""

    replica: Replica
    hit: Hit
    has_room: bool
    is_isolated: bool = False  # the sequence is to run in steps of its own there

    @property
    def pending_prefix(self) -> PendingPrefix | None:
        """The shared prefix to wait for, which another sequence is about to compute."""
        return None if self.is_isolated else self.hit.pending_prefix


OfferOf = Callable[[Replica], PlacementOffer | None]


def num_owed_blocks(replica: Replica, sequence: Sequence) -> int:
    """Blocks still to be allocated for the known tokens of a running sequence, if more than one is to be computed."""
    num_known = sequence.num_known
    if num_known - sequence.num_computed <= 1:
        return 0
    return replica.shape.num_blocks_for(num_known) - len(sequence.block_ids)


class Placement:
    """Compares replicas by the predicted seconds until a sequence would end there, from each replica's learned costs.

    These are the time to compute the known tokens of what runs there; then to compute those of the sequence that are
    not cached, or to copy them from the host; then one step for each token that it is expected to sample, together with
    all that runs there. Among equals, the replica with the fewest running sequences is chosen. Replicas count as
    equally fast if their learned costs differ little, or if they have not run long enough. So a sequence goes to its
    cached prefix as long as that saves more than sharing steps with more sequences costs.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        """`replicas` is the owner's own list, which grows and shrinks."""
        self._replicas = replicas
        self._loads: WeakKeyDictionary[Replica, ReplicaLoad] = WeakKeyDictionary()
        self._usual: CostModel | None = None  # of the replica that asked last and has learned its costs
        self._placed: dict[Replica, None] = {}  # given a sequence while another replica's step was made

    # Loads.

    def measure(self, replica: Replica) -> ReplicaLoad:
        """Measures the load of a replica. O(sequences that run)."""
        num_tokens = num_blocks = 0
        size = replica.shape.block_size
        for sequence in replica.running:
            num_known = len(sequence.tokens) + sequence.num_promised
            if num_known - sequence.num_computed > 1:
                num_tokens += num_known - sequence.num_computed
                num_blocks += num_owed_blocks(replica, sequence)
        num_blocks += sum(beams[0].num_fork_blocks(size) for beams in replica.searches.values())
        num_tokens += sum(len(s.tokens) for s in replica.indivisible if not s.num_steps_in_flight)
        num_tokens += sum(s.num_uncomputed for s in replica.isolated)
        if replica.costs.has_learned or self._usual is None:
            self._usual = replica.costs
        load = self._loads[replica] = ReplicaLoad(num_tokens, num_blocks)
        return load

    def load(self, replica: Replica) -> ReplicaLoad:
        """The load as last measured, plus what was admitted since: it may be too large, never too small."""
        return self._loads[replica] if replica.num_running and replica in self._loads else self.measure(replica)

    def note_admitted(self, replica: Replica, sequence: Sequence) -> None:
        """A sequence was admitted to a replica."""
        before = self.load(replica) if replica.num_running > 1 else ReplicaLoad()
        num_owed = replica.shape.num_blocks_for(sequence.num_known) - len(sequence.block_ids)
        if sequence is sequence.unit[0]:
            num_owed += sequence.num_fork_blocks(replica.shape.block_size)
        if replica.shape.is_indivisible(sequence.request):
            num_owed = 0
        self._loads[replica] = ReplicaLoad(before.num_tokens + sequence.num_uncomputed, before.num_blocks + num_owed)

    def forget(self, replica: Replica) -> None:
        """A replica was removed."""
        self._placed.pop(replica, None)

    # Choices.

    def note_placed(self, replica: Replica) -> None:
        """A replica was given a sequence while another replica's step was made."""
        self._placed[replica] = None

    def take_placed(self) -> list[Replica]:
        """The replicas of `note_placed` since the last call."""
        placed, self._placed = list(self._placed), {}
        return placed

    def choose(self, asks: Replica, sequence: Sequence, num_output: float, offer_of: OfferOf) -> PlacementOffer | None:
        """The best offer for a sequence that will probably sample `num_output` more tokens.

        None unless the replica that asks has room for it, or a prefix to wait for.
        """
        own = offer_of(asks)
        if own is None or not (own.has_room or own.pending_prefix):
            return None
        if len(self._replicas) == 1:
            return own
        offers = (other for replica in self._others(asks) if (other := offer_of(replica)) is not None)
        usable = (offer for offer in offers if offer.has_room or offer.pending_prefix)
        return min(chain((own,), usable), key=lambda offer: self._rank(offer, sequence, num_output))

    def _others(self, asks: Replica) -> Iterator[Replica]:
        """The replicas after the one that asks, round robin. One with sequences of its own that wait for room takes no
        others.
        """
        index = self._replicas.index(asks)
        others = chain(islice(self._replicas, index + 1, None), islice(self._replicas, index))
        return (other for other in islice(others, MAX_OTHERS) if other.admits and not other.has_returning)

    def _rank(self, offer: PlacementOffer, sequence: Sequence, num_output: float) -> tuple[float, int]:
        replica = offer.replica
        num_running, num_known = replica.num_running, len(sequence.tokens)
        costs = self._costs(replica, num_running + 1)
        num_found = offer.hit.num_full * replica.shape.block_size
        if offer.pending_prefix is not None:
            num_found = offer.pending_prefix.num_tokens
        num_found = min(num_found, num_known - 1)
        seconds = costs.recompute_seconds(self.load(replica).num_tokens)
        seconds += costs.recompute_seconds(num_known - num_found, num_found)
        if offer.hit.host_ids:
            seconds += costs.swap_seconds(0, len(offer.hit.host_ids))
        seconds += num_output * costs.step_seconds(0, num_running + 1)
        return seconds, num_running

    def _costs(self, replica: Replica, num_decodes: int) -> CostModel:
        """A replica's own costs, if it has learned them and they clearly differ from the usual; else the usual ones."""
        own, usual = replica.costs, self._usual
        if usual is None or own is usual:
            return own
        if not own.has_learned:
            return usual
        seconds, usual_seconds = own.step_seconds(0, num_decodes), usual.step_seconds(0, num_decodes)
        return usual if usual_seconds / _ALIKE < seconds < usual_seconds * _ALIKE else own
