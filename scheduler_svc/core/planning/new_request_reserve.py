"""What is left to new requests of tenants with few slots, so that they wait for little.

The blocks of a preempted sequence are free only when its steps in flight are done and its KV is copied. A new request
of another tenant would wait for these steps. So after such a request, blocks for a few more are kept free, and prompts
of tenants with many more slots neither make steps long nor hold back blocks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.core.policy.waiting import WaitingSequences
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

RESERVE_SECONDS = 60.0
"""For how long blocks are kept free after a request that could preempt sequences of other tenants."""
NUM_REQUESTS = 4
"""For how many new requests blocks are kept free."""
PERIOD_SECONDS = 15.0
"""Requests of a tenant within such a time count as one of the largest need and the highest priority."""
_LARGE = 4  # a tenant whose prompts are limited holds at least one in so many slots
_MANY_MORE = 4  # times as many as one whose requests are new, by weight
_MOST = 16  # of a replica's blocks, at most one in so many


@dataclass(slots=True)
class _Need:
    """What the new requests of a tenant in one period need, until a time."""

    tenant: str
    weight: float
    priority: int
    num_blocks: int
    until: float


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Whose prompts are limited for new requests: by tenant, those up to a priority."""

    priorities: Mapping[str, int]

    def __bool__(self) -> bool:
        return bool(self.priorities)

    def applies_to(self, sequence: Sequence) -> bool:
        """Whether a sequence's prompt is limited."""
        request = sequence.request
        return request.tenant in self.priorities and request.priority <= self.priorities[request.tenant]


class NewRequestReserve:
    """How many blocks are kept free, by the needs of new requests that could preempt sequences of other tenants."""

    def __init__(self, waiting: WaitingSequences) -> None:
        self._waiting = waiting
        self._needs: WeakKeyDictionary[Replica, dict[tuple[str, int], _Need]] = WeakKeyDictionary()

    def note(self, replica: Replica, sequence: Sequence, num_blocks: int) -> None:
        """A new request needs `num_blocks`, and may preempt sequences of other tenants for a slot or for blocks."""
        request, now = sequence.request, self._waiting.now
        key = request.tenant, int(now // PERIOD_SECONDS)
        needs = self._needs.setdefault(replica, {})
        need = needs.setdefault(key, _Need(request.tenant, request.weight, request.priority, num_blocks, now))
        need.weight = request.weight
        need.priority = max(need.priority, request.priority)
        need.num_blocks = max(need.num_blocks, num_blocks)
        need.until = now + RESERVE_SECONDS

    def left_by(self, replica: Replica, sequence: Sequence) -> int:
        """Blocks that a sequence leaves to requests of tenants with fewer slots, of no lower priority."""
        request = sequence.request
        return self._largest(replica, request.tenant, request.priority)

    def left_by_all(self, replica: Replica) -> int:
        """Blocks that the tenant with the most slots leaves, by its sequences of the lowest priority."""
        held = replica.num_slots_of
        if not self._current(replica) or not replica.running:
            return 0
        most = max(held.items(), key=lambda each: (each[1], each[0]))[0]
        priorities = [each.request.priority for each in replica.running if each.request.tenant == most]
        return self._largest(replica, most, min(priorities)) if priorities else 0

    def prompt_limit(self, replica: Replica) -> PromptLimit:
        """Whose prompts are limited for all new requests that came.

        These are the tenants that hold a quarter of all slots in use, and by weight four times as many as the tenant of
        a new request would with one more. O(sequences that run), and for each of these tenants O(needs), of which a
        tenant has five at most.
        """
        return self._limit(replica, self._current(replica))

    def limit_for(self, replica: Replica, sequence: Sequence) -> PromptLimit:
        """Whose prompts are limited for a new request, if others of its tenant came; nobody's for another sequence."""
        request = sequence.request
        if sequence.num_output:
            return PromptLimit({})
        limit = self._limit(replica, [each for each in self._current(replica) if each.tenant == request.tenant])
        return PromptLimit(dict.fromkeys(limit.priorities, request.priority))

    def _limit(self, replica: Replica, needs: Collection[_Need]) -> PromptLimit:
        held = replica.num_slots_of
        weights = {sequence.request.tenant: sequence.request.weight for sequence in replica.running} if needs else {}
        priorities: dict[str, int] = {}
        for tenant, weight in weights.items():
            if _LARGE * held[tenant] < replica.num_slots:
                continue
            for need in needs:
                if held[tenant] / weight >= _MANY_MORE * (held.get(need.tenant, 0) + 1) / need.weight:
                    priorities[tenant] = max(need.priority, priorities.get(tenant, need.priority))
        return PromptLimit(priorities)

    def _largest(self, replica: Replica, tenant: str, priority: int) -> int:
        held = replica.num_slots_of
        wanted = (
            need.num_blocks
            for need in self._current(replica)
            if need.tenant != tenant and need.priority >= priority and held.get(need.tenant, 0) < held[tenant]
        )
        return min(NUM_REQUESTS * max(wanted, default=0), replica.shape.num_blocks // _MOST)

    def _current(self, replica: Replica) -> list[_Need]:
        """Needs, without those of requests that came long ago."""
        needs = self._needs.get(replica, {})
        for key in [key for key, need in needs.items() if need.until <= self._waiting.now]:
            del needs[key]
        return list(needs.values())
