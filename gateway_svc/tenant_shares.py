"""What tenants share at a gateway: places for calls, and bytes of bodies. No tenant has more than is free beside it.

So each has at most half of what the others leave: the first one half of all, the next one a quarter where the first has
its half. One that has nothing may take a call or a whole message, as long as it is free. Bodies over HTTP are taken
part by part.
"""

from collections import Counter

from gateway_svc.request_errors import RETRY_AFTER_SECONDS
from svc_common.errors import QuireError, Reason


class NoShare(QuireError):  # noqa: N818
    """Too few units are free, or would be for other tenants. `unit` is what errors call the units."""

    def __init__(self, reason: Reason, message: str, unit: str, subject: str | None = None) -> None:
        super().__init__(reason, message, retry_after=RETRY_AFTER_SECONDS, subject=subject)
        self.unit = unit


class TenantShares:
    """So many units, shared by tenants. Each holder of some has a Share."""

    def __init__(self, total: int, unit: str, *, most_per_tenant: int | None = None, has_tenants: bool = True) -> None:
        """`unit` is what errors call the units, such as "calls in progress". A tenant has `most_per_tenant` at most.

        Without `has_tenants` there is one tenant, which may take all.
        """
        self._total = total
        self._unit = unit
        self._most_per_tenant = most_per_tenant
        self._has_tenants = has_tenants
        self._num_taken = 0
        self._taken: Counter[str] = Counter()

    def share(self, tenant: str) -> "Share":
        """A share of a tenant, which is empty."""
        return Share(self, tenant)

    def take(self, tenant: str, count: int) -> None:
        """Takes units for a tenant. Raises NoShare: CAPACITY_EXHAUSTED where too few are free, else
        TENANT_QUOTA_EXCEEDED where the tenant would have too many.
        """
        num_free = self._total - self._num_taken
        if count > num_free:
            message = f"this gateway has {self._num_taken} of at most {self._total} {self._unit}"
            raise NoShare(Reason.CAPACITY_EXHAUSTED, message, self._unit)
        held = self._taken[tenant]
        most = self._most(held, num_free)
        if held + count > most:
            message = f"the tenant has {held} {self._unit} at this gateway, and may have {most} at most now"
            raise NoShare(Reason.TENANT_QUOTA_EXCEEDED, message, self._unit, f"tenant:{tenant}")
        self._num_taken += count
        self._taken[tenant] += count

    def _most(self, held: int, num_free: int) -> int:
        """How many a tenant that has `held` may have now."""
        if not self._has_tenants:
            most = self._total
        elif held:
            most = held + max(0, num_free - held) // 2
        else:
            most = num_free
        return most if self._most_per_tenant is None else min(most, self._most_per_tenant)

    def give_back(self, tenant: str, count: int) -> None:
        """Frees units that a tenant has taken."""
        self._num_taken -= count
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]


class Share:
    """The units of one holder."""

    __slots__ = ("_shares", "count", "tenant")

    def __init__(self, shares: TenantShares, tenant: str) -> None:
        self._shares = shares
        self.tenant = tenant
        self.count = 0

    def add(self, count: int) -> None:
        """Takes more units. Raises NoShare as TenantShares.take() does."""
        if count:
            self._shares.take(self.tenant, count)
            self.count += count

    def resize(self, count: int) -> None:
        """Takes or frees units, so that it has `count`. Raises NoShare as TenantShares.take() does."""
        if count > self.count:
            self.add(count - self.count)
        elif count < self.count:
            self._shares.give_back(self.tenant, self.count - count)
            self.count = count

    def release(self) -> None:
        """Frees its units."""
        self.resize(0)
