"""What is kept for new requests of tenants with few slots, so that they wait for little.

The blocks of a preempted sequence are free only when its steps in flight are done and its KV is copied. A new request
of another tenant would wait for these steps. So after such a request, blocks for a few more are kept free, and prompts
of tenants with much more neither make steps long nor hold back blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

RESERVE_SECONDS = 60.0
"""For how long blocks are kept free after a request that could preempt sequences of other tenants."""
NUM_REQUESTS = 4
"""For how many new requests blocks are kept free."""
_LARGE = 4  # a tenant with much more holds at least one in so many slots
_MUCH_MORE = 4  # times as many as a small one, by weight
_MOST = 16  # of a replica's blocks, at most one in so many


@dataclass(frozen=True, slots=True)
class _Need:
    """The blocks of a new request, until a time."""

    tenant: str
    weight: float
    priority: int
    num_blocks: int
    until: float

    def covers(self, other: "_Need") -> bool:
        """Whether what is kept for this request is enough for an earlier one of its tenant, too."""
        is_least = self.priority >= other.priority and self.num_blocks >= other.num_blocks
        return self.tenant == other.tenant and is_least


@dataclass(frozen=True, slots=True)
class LargerTenants:
    """Tenants with much more than those of new requests."""

    priorities: Mapping[str, int]
    """By tenant, the highest priority of these requests. Sequences of higher priority are not limited for them."""

    def __bool__(self) -> bool:
        return bool(self.priorities)

    def __contains__(self, sequence: Sequence) -> bool:
        request = sequence.request
        return request.tenant in self.priorities and request.priority <= self.priorities[request.tenant]


class NewRequestReserve:
    """How many blocks are kept free, by the needs of new requests that could preempt sequences of other tenants."""

    def __init__(self, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self._needs: WeakKeyDictionary[Replica, list[_Need]] = WeakKeyDictionary()

    def note(self, replica: Replica, sequence: Sequence, num_blocks: int) -> None:
        """A new request needs `num_blocks`, and may preempt sequences of other tenants for a slot or for blocks."""
        request = sequence.request
        need = _Need(request.tenant, request.weight, request.priority, num_blocks, self._waiting.now + RESERVE_SECONDS)
        self._needs[replica] = [each for each in self._current(replica) if not need.covers(each)] + [need]

    def left_by(self, replica: Replica, tenant: str) -> int:
        """Blocks that a tenant's sequences leave to tenants with fewer slots."""
        return self._largest(replica, replica.num_slots_of[tenant], tenant)

    def left_by_all(self, replica: Replica) -> int:
        """Blocks that the tenant with the most slots leaves."""
        if not self._current(replica) or not replica.num_slots_of:
            return 0
        tenant, num_slots = max(replica.num_slots_of.items(), key=lambda each: (each[1], each[0]))
        return self._largest(replica, num_slots, tenant)

    def larger_tenants(self, replica: Replica) -> LargerTenants:
        """The tenants with much more than any tenant of which new requests come.

        These are the tenants that hold a quarter of all slots in use, and by weight four times as many as the other one
        would with one more. O(sequences that run + needs).
        """
        return self._larger(replica, self._current(replica))

    def larger_than(self, replica: Replica, sequence: Sequence) -> LargerTenants:
        """The tenants with much more than that of a new request, if such requests of it come; none for another one."""
        request = sequence.request
        if sequence.num_output:
            return LargerTenants({})
        own = [each for each in self._current(replica) if each.tenant == request.tenant]
        larger = self._larger(replica, own)
        return LargerTenants({tenant: min(most, request.priority) for tenant, most in larger.priorities.items()})

    def _larger(self, replica: Replica, needs: Iterable[_Need]) -> LargerTenants:
        held = replica.num_slots_of
        weights = {sequence.request.tenant: sequence.request.weight for sequence in replica.running} if needs else {}
        priorities: dict[str, int] = {}
        for tenant, weight in weights.items():
            if _LARGE * held[tenant] < replica.num_slots:
                continue
            for need in needs:
                if held[tenant] / weight >= _MUCH_MORE * (held.get(need.tenant, 0) + 1) / need.weight:
                    priorities[tenant] = max(need.priority, priorities.get(tenant, need.priority))
        return LargerTenants(priorities)

    def _largest(self, replica: Replica, num_slots: int, tenant: str) -> int:
        held, needs = replica.num_slots_of, self._current(replica)
        wanted = (each.num_blocks for each in needs if each.tenant != tenant and held.get(each.tenant, 0) < num_slots)
        return min(NUM_REQUESTS * max(wanted, default=0), replica.shape.num_blocks // _MOST)

    def _current(self, replica: Replica) -> list[_Need]:
        """Needs, without those of requests that came long ago."""
        needs = self._needs.get(replica, [])
        if any(each.until <= self._waiting.now for each in needs):
            needs = self._needs[replica] = [each for each in needs if each.until > self._waiting.now]
        return needs
