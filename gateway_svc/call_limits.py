"""How many calls of a tenant are in progress at a port, and how many bytes their bodies take."""

import sys
from dataclasses import dataclass, field

from gateway_svc.tenant import Tenant
from gateway_svc.tenant_shares import NoShare, Share, TenantShares

CALLS, BODY_BYTES, SLOW_MESSAGES = "calls in progress", "bytes of bodies in progress", "messages that arrive slowly"
"""Units of TenantShares."""
_SPARE_CALLS = 64  # of a port, all tenants together
_CANCELLING = "calls in progress in spare places, which cancel others"


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call in progress. `body` are the bytes of its body, from when they arrive until its requests are submitted."""

    place: Share
    body: Share

    def end(self) -> None:
        """Frees what it holds. The next call of this has no effect."""
        self.place.release()
        self.body.release()


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one port. `calls` are those in progress after login, `bodies` the bytes of the bodies of both ports.

    `spare` are places for calls that cancel others, which free places.
    """

    calls: TenantShares
    bodies: TenantShares
    spare: TenantShares = field(default_factory=lambda: TenantShares(_SPARE_CALLS, _CANCELLING))

    def begin(self, tenant: Tenant, *, cancels: bool = False) -> OpenCall:
        """Counts a tenant's call from its login on. Raises QuireError where there are too many; for one that cancels
        others, where no spare place is free either.
        """
        place = self.calls.share(tenant.name)
        try:
            place.add(1)
        except NoShare:
            if not cancels:
                raise
            place = self.spare.share(tenant.name)
            place.add(1)
        return OpenCall(place, self.body(tenant))

    @classmethod
    def unlimited(cls) -> "CallLimits":
        """For one caller, whose calls have no limit."""
        return cls(*(TenantShares(sys.maxsize, unit, has_tenants=False) for unit in (CALLS, BODY_BYTES)))

    def body(self, tenant: Tenant) -> Share:
        """The bytes of another body of a tenant, none so far."""
        return self.bodies.share(tenant.name)
