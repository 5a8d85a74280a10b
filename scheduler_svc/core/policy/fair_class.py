"""One class of priority under fair shares: which tenant's turn it is, by the tokens that each has received."""

from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler_svc.core.lazy_heap import LazyHeap
from scheduler_svc.core.policy.tenants import TenantQueues

CREDIT_TOKENS = 1024  # weighted tokens that a tenant may have been served less than others, when it comes back

Turn = tuple[float, int, int]
"""A tenant's counter in a class. Of equals the one that was charged longest ago is first, then the one that came first.
"""


class FairClass:
    """Tenants with a sequence to admit in this class, by their counters in it.

    A tenant's counter in a class is all that it has received, plus an offset of this class: tokens received in another
    class do not count here. A tenant that comes for the first time starts at the smallest counter. One that comes back
    keeps its own, so that a tenant with few requests does not queue behind those that are served all the time; but it
    is lifted to CREDIT_TOKENS below the largest that the smallest counter was, so that it saves up no more turns than
    that. Counters only grow; a tenant that has received tokens since it was sorted is sorted again when it comes to the
    front.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.rank = 0  # index among the classes, from the lowest
        self.num_waiting = 0  # sequences whose own class this is
        self.used_at = 0.0  # when the last one of them was queued, in seconds
        # Tenants without a turn, by the time at which their first sequence of a lower class rises to this one.
        self.not_eligible: LazyHeap[TenantQueues, float] = LazyHeap()
        self._ready: LazyHeap[TenantQueues, Turn] = LazyHeap()
        self._offsets: dict[TenantQueues, float] = {}
        self._min_counter = 0.0  # as last known
        self._floor = -float(CREDIT_TOKENS)  # below which no counter is
        self._num_entered = 0

    def __contains__(self, tenant: TenantQueues) -> bool:
        """Whether a tenant has a turn here."""
        return tenant in self._ready

    def counter(self, tenant: TenantQueues) -> float:
        """A tenant's counter here, were it to enter the class now."""
        if tenant in self._ready:
            return tenant.served + self._offsets[tenant]
        return self._counter(tenant, self.min_counter())

    def debt(self, tenant: TenantQueues) -> float:
        """How far a tenant's counter is above the smallest one of those with a turn; negative if it is below that."""
        least = self.min_counter()
        return self._counter(tenant, least) - least

    def _counter(self, tenant: TenantQueues, least: float) -> float:
        """The same, if the smallest counter is `least`."""
        offset = self._offsets.get(tenant)
        if offset is None:
            return least
        counter = tenant.served + offset
        return counter if tenant in self._ready else max(counter, self._floor)

    def turn(self, tenant: TenantQueues) -> Turn:
        """Sort key of a tenant's turn. The smallest is first."""
        entered = self._ready.key(tenant)[2] if tenant in self._ready else self._num_entered
        return (self.counter(tenant), tenant.charged_at, entered)

    def min_counter(self) -> float:
        """The smallest counter of the tenants with a turn; if there are none, the last known one."""
        first = self._first()
        if first is None:
            return self._min_counter
        self._min_counter = first[0][0]
        # Not below the smallest counter of now: tenants that come back one after another would each lower it.
        self._floor = max(self._floor, self._min_counter - CREDIT_TOKENS)
        return self._min_counter

    def enter(self, tenant: TenantQueues) -> None:
        """Gives a tenant a turn, unless it has one."""
        if tenant in self._ready:
            return
        self._offsets[tenant] = self.counter(tenant) - tenant.served
        self._ready.put(tenant, (tenant.served + self._offsets[tenant], tenant.charged_at, self._num_entered))
        self._num_entered += 1

    def leave(self, tenant: TenantQueues) -> None:
        """A tenant has nothing to admit here any more."""
        if tenant in self._ready:
            self.min_counter()
            self._ready.discard(tenant)

    def next(self) -> TenantQueues | None:
        """The tenant whose turn it is."""
        first = self._first()
        return first[1] if first is not None else None

    def _first(self) -> tuple[Turn, TenantQueues] | None:
        while (first := self._ready.first()) is not None and first[0][1] != first[1].charged_at:
            self._ready.put(first[1], self.turn(first[1]))  # it was charged since it was sorted
        return first

    def turns(self) -> Iterator[TenantQueues]:
        """The tenants with a turn, in order; amortized O(log n) each. None must come, go or be charged meanwhile."""
        charged: list[tuple[Turn, TenantQueues]] = []  # since they were sorted: their turns are later than it says
        for known, tenant in self._ready.ascending():
            while charged and charged[0][0] < known:
                yield heappop(charged)[1]
            if (turn := self.turn(tenant)) == known:
                yield tenant
            else:
                heappush(charged, (turn, tenant))
        while charged:
            yield heappop(charged)[1]

    def owes_nothing(self, tenant: TenantQueues) -> bool:
        """Whether a tenant can be forgotten: it has no turn, and its counter is not above the smallest one."""
        return tenant not in self._ready and self.counter(tenant) <= self.min_counter()

    def forget(self, tenant: TenantQueues) -> None:
        """Drops a tenant's offset."""
        self._offsets.pop(tenant, None)
