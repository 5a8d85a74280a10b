"""Blocks that tenants with many slots leave to those with few, so that these need not wait until blocks are freed.

A running sequence gives up its blocks only when its steps in flight are done and its KV is copied. That takes some
steps, which a new request of another tenant would wait for. So once such requests come, room for a few is kept.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica

ROOM_SECONDS = 60.0
"""For how long room is kept after the last request that had a right to others' slots or blocks."""
NUM_REQUESTS = 4
"""For how many new requests room is kept."""
_MOST = 16  # of a replica's blocks, at most one in so many


@dataclass(slots=True)
class _Need:
    """What the largest of a tenant's new requests needed lately."""

    num_blocks: int
    until: float


class NewcomerRoom:
    """How many blocks are kept for the new requests of each tenant that had a right to others' blocks lately."""

    def __init__(self, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self._needs: WeakKeyDictionary[Replica, dict[str, _Need]] = WeakKeyDictionary()

    def note(self, replica: Replica, tenant: str, num_blocks: int) -> None:
        """A new request of a tenant that may take slots or blocks of others needs so many blocks."""
        now = self._waiting.now
        needs = self._needs.setdefault(replica, {})
        known = needs.get(tenant)
        if known is not None and known.until > now:
            num_blocks = max(num_blocks, known.num_blocks)
        needs[tenant] = _Need(num_blocks, now + ROOM_SECONDS)

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
