"""Blocks that are kept free for new requests of tenants with few slots, so that these need not wait for preemptions.

The blocks of a preempted sequence are free only when its steps in flight are done and its KV is copied. A new request
of another tenant would wait for these steps. So after such a request, blocks for a few more are kept free.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica

RESERVE_SECONDS = 60.0
"""For how long blocks are kept free after the last request that could preempt sequences of other tenants."""
NUM_REQUESTS = 4
"""For how many new requests blocks are kept free."""
_MOST = 16  # of a replica's blocks, at most one in so many


@dataclass(slots=True)
class _Need:
    """The blocks of the largest of a tenant's new requests, until a time."""

    num_blocks: int
    until: float


class NewRequestReserve:
    """How many blocks are kept free, by the needs of new requests that could preempt sequences of other tenants."""

    def __init__(self, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self._needs: WeakKeyDictionary[Replica, dict[str, _Need]] = WeakKeyDictionary()

    def note(self, replica: Replica, tenant: str, num_blocks: int) -> None:
        """A new request that may preempt sequences of other tenants needs `num_blocks`."""
        now = self._waiting.now
        needs = self._needs.setdefault(replica, {})
        known = needs.get(tenant)
        if known is not None and known.until > now:
            num_blocks = max(num_blocks, known.num_blocks)
        needs[tenant] = _Need(num_blocks, now + RESERVE_SECONDS)

    def left_by(self, replica: Replica, tenant: str) -> int:
        """Blocks that a tenant's sequences leave to tenants with fewer slots."""
        return self._largest(replica, replica.num_slots_of[tenant], tenant)

    def left_by_all(self, replica: Replica) -> int:
        """Blocks that the tenant with the most slots leaves."""
        if not self._needs.get(replica) or not replica.num_slots_of:
            return 0
        tenant, num_slots = max(replica.num_slots_of.items(), key=lambda each: (each[1], each[0]))
        return self._largest(replica, num_slots, tenant)

    def _largest(self, replica: Replica, num_slots: int, tenant: str) -> int:
        needs = self._needs.get(replica)
        if not needs:
            return 0
        for each in [name for name, need in needs.items() if need.until <= self._waiting.now]:
            del needs[each]
        held = replica.num_slots_of
        wanted = [need.num_blocks for each, need in needs.items() if each != tenant and held.get(each, 0) < num_slots]
        return min(NUM_REQUESTS * max(wanted, default=0), replica.shape.num_blocks // _MOST)
