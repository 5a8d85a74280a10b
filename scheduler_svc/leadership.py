"""The election of the leader by the store's lease. Workers and store check the epoch, which makes it safe."""

import asyncio
import logging
import time

from scheduler_svc.store.base import Store, StoreUnavailable

log = logging.getLogger("quire.scheduler")

_POLL = 0.1  # seconds between a candidate's checks of the lease, and after a call that failed
_KEEP = 4  # times that a leader renews its lease while it lasts


class Fenced(Exception):  # noqa: N818
    """Another scheduler leads, or has led since."""


class Leadership:
    """One scheduler in the election. `holder` is its unique name; a lease lasts `lease_seconds`."""

    def __init__(self, store: Store, holder: str, lease_seconds: float) -> None:
        self.epoch = 0
        self._store = store
        self._holder = holder
        self._seconds = lease_seconds
        self._poll = min(_POLL, lease_seconds / _KEEP)
        self._calling = asyncio.Lock()  # a call with the former epoch would be fenced by the new one

    async def acquire(self, standby: bool) -> int:
        """Waits until this scheduler leads; returns its epoch. None begins to lead while the store is unavailable.

        A candidate takes over at once from a leader that it saw. It waits for the length of a lease first where nobody
        could renew it in time: after the store was unavailable or was restarted. The former leader leads on meanwhile,
        and renews the lease as soon as it can, also one that runs out before. A standby waits in the same way when it
        starts: another candidate may take it.
        """
        left_to_others_until = time.monotonic() + (self._seconds if standby else 0.0)
        left_to_former_until = 0.0
        num_restarts = self._store.num_restarts
        while True:
            try:
                # An answer that takes longer may hide that the lease could not be renewed.
                leader = await self._store.leader(self._seconds / 2)
                if num_restarts != self._store.num_restarts:
                    num_restarts = self._store.num_restarts
                    left_to_former_until = time.monotonic() + self._seconds
                if leader not in (None, self._holder):
                    left_to_others_until = 0.0
                elif time.monotonic() >= max(left_to_others_until, left_to_former_until):
                    epoch = await self._store.take_lease(self._holder, self._seconds)
                    if epoch is not None:
                        self.epoch = epoch
                        return epoch
            except StoreUnavailable:
                left_to_former_until = time.monotonic() + self._seconds
            await asyncio.sleep(self._poll)

    async def keep(self) -> None:
        """Renews the lease until another scheduler leads, then raises Fenced. Calls that fail are repeated."""
        begun = time.monotonic()
        while True:
            # Counted from call to call, so that a slow call leaves as much time for the next one.
            await asyncio.sleep(max(self._poll, begun + self._seconds / _KEEP - time.monotonic()))
            begun = time.monotonic()
            try:
                async with self._calling:
                    kept = await self._store.keep_lease(self._holder, self.epoch, self._seconds)
            except StoreUnavailable:
                continue  # workers accept this epoch as long as there is no later one
            if not kept:
                raise Fenced("another scheduler has taken over")

    async def raise_epoch(self, above: int) -> int:
        """Begins an epoch above one that a worker has seen.

        Raises Fenced where another scheduler leads, or has led, and EpochOutsideWindow where no leader can have begun
        the worker's epoch.

        Until the store answers, it is not known which epoch is this leader's, and no other call renews the lease.
        """
        async with self._calling:
            while self.epoch <= above:  # else it was raised for another worker
                try:
                    epoch = await self._store.take_lease(self._holder, self._seconds, above, self.epoch)
                except StoreUnavailable as error:
                    log.warning("no later term while the store cannot be reached", extra={"error": str(error)})
                    await asyncio.sleep(self._poll)
                    continue
                if epoch is None:
                    raise Fenced("another scheduler has taken over")
                self.epoch = epoch
            return self.epoch

    async def release(self) -> None:
        """Releases the lease, if the store can be reached."""
        try:
            await self._store.release_lease(self._holder)
        except StoreUnavailable as error:
            log.warning("the lease could not be released: it runs out", extra={"error": str(error)})
