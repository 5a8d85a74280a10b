"""A scheduler's life: it waits for the lease, takes over requests, leads, and hands over."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.leadership import Fenced, Leadership
from scheduler_svc.metrics import LEADER
from scheduler_svc.request_log import RequestLog
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import StaleEpoch, Store, StoreUnavailable
from scheduler_svc.store.eviction import watch_eviction
from scheduler_svc.worker_link import WorkerPool

log = logging.getLogger("quire.scheduler")

_RETRY = 0.1  # seconds until a call that failed is repeated
_COMMIT_TIMEOUT = 1.0  # seconds to wait for steps in flight at the end
_FLUSH_TIMEOUT = 2.0  # seconds to wait for the store at the end


class Leader:
    """One scheduler, from its candidacy to its end. `holder` is its unique name. `on_lead` gives the engine to its
    servers.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        holder: str,
        on_lead: Callable[[SchedulerEngine], Awaitable[None]],
    ) -> None:
        self._settings = settings
        # Read at start-up: a standby may lead long after the package of its policy was replaced on disk.
        self._limits = settings.limits
        self._store = store
        self._leadership = Leadership(store, holder, settings.lease_seconds)
        self._on_lead = on_lead
        self._is_fenced = asyncio.Event()
        self._engine: SchedulerEngine | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._parts: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Waits for the lease, and leads until another scheduler does. Raises where a part of this one fails."""
        acquiring = asyncio.create_task(self._leadership.acquire(self._settings.standby))
        self._parts.add(acquiring)
        try:
            await asyncio.wait([acquiring])
            epoch = acquiring.result()
            log.info("leading", extra={"epoch": epoch})
            self._keeping = asyncio.create_task(self._leadership.keep())
            self._opening = asyncio.create_task(self._open(epoch))
            self._parts |= {self._keeping, self._opening}
            self._begin(self._until_fenced())
            while True:
                done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    self._parts.discard(part)
                    if not part.cancelled():  # some are cancelled before the lease is released
                        part.result()
        except Fenced as error:
            log.critical("fenced", extra={"why": str(error)})
        finally:
            self._engine = None
            LEADER.set(0)
            for part in self._parts:
                part.cancel()
            await asyncio.gather(*self._parts, return_exceptions=True)

    async def _open(self, epoch: int) -> None:
        """Takes over the live requests, and starts."""
        settings = self._settings
        logs = await self._live()
        make_core, fence = partial(Scheduler, self._limits), self._is_fenced.set
        engine = SchedulerEngine(make_core, self._store, epoch, settings.engine, self._leadership.raise_epoch, fence)
        engine.take_over(logs)
        workers = WorkerPool(engine, settings.worker_addresses)
        self._begin(
            engine.journal.run(), engine.watch(), self._renew(engine), workers.run(), watch_eviction(self._store)
        )
        log.info("requests taken over", extra={"requests": len(logs)})
        LEADER.set(1)
        self._engine = engine
        await self._on_lead(engine)

    def _begin(self, *works: Coroutine[None, None, None]) -> None:
        self._parts.update(map(asyncio.create_task, works))

    async def hand_over(self) -> None:
        """Writes everything that is committed, and releases the lease. To be called while `run` runs.

        Servers that are not open to the engine yet will not be opened.
        """
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._engine is not None:
            await self._engine.stop(_COMMIT_TIMEOUT)
            if not await self._engine.journal.flush(_FLUSH_TIMEOUT):
                log.warning("the store does not have everything")
        if self._keeping is not None:
            self._keeping.cancel()  # it would take the lease again
            await asyncio.gather(self._keeping, return_exceptions=True)
            await self._leadership.release()

    async def _live(self) -> list[RequestLog]:
        while True:
            try:
                return await self._store.live()
            except StoreUnavailable as error:
                log.warning("requests cannot be taken over yet", extra={"error": str(error)})
                await asyncio.sleep(_RETRY)

    async def _until_fenced(self) -> None:
        await self._is_fenced.wait()
        raise Fenced("a later term has begun")

    async def _renew(self, engine: SchedulerEngine) -> None:
        """Keeps the records of live requests from expiring."""
        while True:
            await asyncio.sleep(self._settings.record_ttl / 3)
            try:
                async with engine.journal.paused():  # the epoch does not change meanwhile
                    await self._store.renew([live.log.key for live in engine.requests.all], engine.epoch)
            except StoreUnavailable as error:
                log.warning("records could not be renewed", extra={"error": str(error)})
            except StaleEpoch:
                self._is_fenced.set()
