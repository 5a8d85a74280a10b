"""A class of priority as tenants stand in it: whose turn it is, by what they were served."""

from scheduler_svc.core.policies.lazy_heap import LazyHeap
from scheduler_svc.core.policies.tenants import TenantQueues

Turn = tuple[float, int]  # a tenant's counter in a class, and which of equals came first


class FairClass:
    """Tenants that have something to run in this class, by their counters in it.

    A tenant's counter in a class is what it was served in all, plus an offset of this class: a tenant that comes to the
    class is lifted to the smallest counter in it, so that nobody saves up turns by being idle, and those who were
    served in another class meanwhile do not spoil the order here. Counters only grow; a tenant that was served
    since it was put in order is put right when it comes to the front.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.rank = 0  # among the classes there are, from the lowest
        self.num_waiting = 0  # sequences of this very class
        self.used_at = 0.0  # when the last one of them came, in seconds
        self.unripe: LazyHeap[TenantQueues, float] = (
            LazyHeap()
        )  # by when the first of their lower classes rises to here
        self._ready: LazyHeap[TenantQueues, Turn] = LazyHeap()
        self._offsets: dict[TenantQueues, float] = {}
        self._floor = 0.0  # the smallest counter, as it was last known
        self._num_entered = 0

    def __contains__(self, tenant: TenantQueues) -> bool:
        """Whether it has a turn here."""
        return tenant in self._ready

    def counter(self, tenant: TenantQueues) -> float:
        """Weighted tokens that it counts as served, were it to come to this class now."""
        if tenant in self._ready:
            return tenant.served + self._offsets[tenant]
        offset = self._offsets.get(tenant)
        # What one that was never here was served elsewhere says nothing of its turns here.
        return self.floor() if offset is None else max(tenant.served + offset, self.floor())

    def debt(self, tenant: TenantQueues) -> float:
        """How far its counter is above the smallest one of those who wait."""
        return max(0.0, self.counter(tenant) - self.floor())

    def turn(self, tenant: TenantQueues) -> Turn:
        """The key that its turn comes by; the smallest goes first."""
        entered = self._ready.key(tenant)[1] if tenant in self._ready else self._num_entered
        return (self.counter(tenant), entered)

    def floor(self) -> float:
        """The smallest counter of those who have a turn; where nobody has, what it was when somebody had."""
        if self.next() is None:
            return self._floor
        first = self._ready.first()
        assert first is not None
        self._floor = first[0][0]
        return self._floor

    def enter(self, tenant: TenantQueues) -> None:
        """Give it a turn, unless it has one."""
        if tenant in self._ready:
            return
        self._offsets[tenant] = self.counter(tenant) - tenant.served
        self._ready.put(tenant, (tenant.served + self._offsets[tenant], self._num_entered))
        self._num_entered += 1

    def leave(self, tenant: TenantQueues) -> None:
        """It has nothing to run here any more."""
        if tenant in self._ready:
            self.floor()
            self._ready.discard(tenant)

    def next(self) -> TenantQueues | None:
        """Whose turn it is: of equal counters, who came to the class first."""
        while (first := self._ready.first()) is not None:
            (known, entered), tenant = first
            counter = tenant.served + self._offsets[tenant]
            if counter == known:
                return tenant
            self._ready.put(tenant, (counter, entered))
        return None

    def owes_nothing(self, tenant: TenantQueues) -> bool:
        """Whether it makes no difference to forget it: it has no turn, and would be lifted anyway."""
        return tenant not in self._ready and self.counter(tenant) <= self.floor()

    def forget(self, tenant: TenantQueues) -> None:
        """Drop its account."""
        self._offsets.pop(tenant, None)
