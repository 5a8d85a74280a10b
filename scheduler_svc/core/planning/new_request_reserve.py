"""What is kept for new requests of tenants with few slots, so that they wait for little.

The blocks of a preempted sequence are free only when its steps in flight are done and its KV is copied. A new request
of another tenant would wait for these steps. So after such a request, blocks for a few more are kept free, and prompts
of tenants with much more neither make steps long nor hold back blocks.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica

RESERVE_SECONDS = 60.0
"""For how long blocks are kept free after the last request that could preempt sequences of other tenants."""
NUM_REQUESTS = 4
"""For how many new requests blocks are kept free."""
_LARGE = 4  # a tenant with much more holds at least one in so many slots
_MUCH_MORE = 4  # times as many as a small one, by weight
_MOST = 16  # of a replica's blocks, at most one in so many


@dataclass(slots=True)
class _Need:
    """The blocks of the largest of a tenant's new requests, until a time."""

    num_blocks: int
    until: float
    weight: float


class NewRequestReserve:
    """How many blocks are kept free, by the needs of new requests that could preempt sequences of other tenants."""

    def __init__(self, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self._needs: WeakKeyDictionary[Replica, dict[str, _Need]] = WeakKeyDictionary()

    def note(self, replica: Replica, tenant: str, num_blocks: int, weight: float = 1.0) -> None:
        """A new request that may preempt sequences of other tenants needs `num_blocks`. `weight` is its tenant's."""
        now = self._waiting.now
        needs = self._needs.setdefault(replica, {})
        known = needs.get(tenant)
        if known is not None and known.until > now:
            num_blocks = max(num_blocks, known.num_blocks)
        needs[tenant] = _Need(num_blocks, now + RESERVE_SECONDS, weight)

    def left_by(self, replica: Replica, tenant: str) -> int:
        """Blocks that a tenant's sequences leave to tenants with fewer slots."""
        return self._largest(replica, replica.num_slots_of[tenant], tenant)

    def left_by_all(self, replica: Replica) -> int:
        """Blocks that the tenant with the most slots leaves."""
        if not self._current(replica) or not replica.num_slots_of:
            return 0
        tenant, num_slots = max(replica.num_slots_of.items(), key=lambda each: (each[1], each[0]))
        return self._largest(replica, num_slots, tenant)

    def larger_tenants(self, replica: Replica, tenant: str | None = None) -> set[str]:
        """The tenants with much more than this one, if new requests of it come; by default than any such tenant.

        These are the tenants that hold a quarter of all slots in use, and by weight four times as many as it would with
        one more. O(sequences that run).
        """
        held, needs = replica.num_slots_of, self._current(replica)
        smaller = needs.keys() if tenant is None else needs.keys() & {tenant}
        if not smaller:
            return set()
        fewest = min((held.get(each, 0) + 1) / needs[each].weight for each in smaller)
        weights = {sequence.request.tenant: sequence.request.weight for sequence in replica.running}
        return {
            each
            for each, weight in weights.items()
            if _LARGE * held[each] >= replica.num_slots and held[each] / weight >= _MUCH_MORE * fewest
        }

    def _largest(self, replica: Replica, num_slots: int, tenant: str) -> int:
        held, needs = replica.num_slots_of, self._current(replica)
        wanted = [need.num_blocks for each, need in needs.items() if each != tenant and held.get(each, 0) < num_slots]
        return min(NUM_REQUESTS * max(wanted, default=0), replica.shape.num_blocks // _MOST)

    def _current(self, replica: Replica) -> dict[str, _Need]:
        """Needs by tenant, without those of requests that came long ago."""
        needs = self._needs.get(replica, {})
        for tenant in [tenant for tenant, need in needs.items() if need.until <= self._waiting.now]:
            del needs[tenant]
        return needs
