"""One term of a leader: it takes over requests, runs the engine and what belongs to it, and ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.leadership import Fenced, Leadership
from scheduler_svc.metrics import LEADER
from scheduler_svc.request_log import RequestLog
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import StaleEpoch, Store, StoreUnavailable
from scheduler_svc.store.eviction import watch_eviction
from scheduler_svc.worker_pool import WorkerPool
from svc_common.identity import Outbound

log = logging.getLogger("quire.scheduler")

_RETRY = 0.1  # seconds until a call that failed is repeated
_FLUSH_TIMEOUT = 2.0  # seconds to wait for the store at the end


class PartFailed(Exception):  # noqa: N818
    """A part of the scheduler raised an exception, its cause: the term cannot continue."""

    def __init__(self, part: str, error: BaseException) -> None:
        super().__init__(f"{part}: {type(error).__name__}: {error}")
        self.part = part
        self.error = error


class Term:
    """The term of the lease that `leadership` has acquired. `on_lead` gives the engine to its servers."""

    def __init__(
        self,
        settings: SchedulerSettings,
        limits: SchedulerLimits,
        store: Store,
        leadership: Leadership,
        on_lead: Callable[[SchedulerEngine], Awaitable[None]],
        to_workers: Outbound,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._store = store
        self._leadership = leadership
        self._on_lead = on_lead
        self._to_workers = to_workers
        self._is_fenced = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine: SchedulerEngine | None = None
        self._parts: set[asyncio.Task[Any]] = set()
        self._keeping = self._begin("lease", leadership.keep())
        self._opening = self._begin("takeover", self._open())
        self._begin("fence", self._until_fenced())
        self._begin("steps", self._until_failed())

    async def run(self) -> None:
        """Leads until another scheduler does, and raises Fenced, or until a part fails, and raises PartFailed."""
        while True:
            done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                self._parts.discard(part)
                error = None if part.cancelled() else part.exception()  # some are cancelled by hand_over()
                if isinstance(error, Fenced):
                    raise error
                if error is not None:
                    raise PartFailed(part.get_name(), error) from error

    async def _open(self) -> None:
        """Takes over the live requests, and starts."""
        settings = self._settings
        logs = await self._live()
        engine = SchedulerEngine(
            partial(Scheduler, self._limits),
            self._store,
            self._leadership.epoch,
            settings.engine,
            self._leadership.raise_epoch,
            on_fenced=self._is_fenced.set,
            on_failed=self._fail,
        )
        engine.take_over(logs)
        workers = WorkerPool(engine, settings.worker_addresses, self._to_workers)
        self._begin("journal", engine.journal.run())
        self._begin("watch", engine.watch())
        self._begin("budgets", engine.leases.run())
        self._begin("records", self._renew(engine))
        self._begin("workers", workers.run())
        self._begin("store", watch_eviction(self._store))
        log.info("requests taken over", extra={"requests": len(logs)})
        LEADER.set(1)
        self._engine = engine
        await self._on_lead(engine)

    def _begin(self, name: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._parts.add(task)
        return task

    async def hand_over(self, commit_timeout: float) -> None:
        """Writes everything that is committed, and releases the lease. `commit_timeout`: seconds for steps in flight.

        To be called once, before `close`. Servers that are not open to the engine yet will not be opened.
        """
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._engine is not None:
            await self._engine.stop(commit_timeout)
            try:
                if not await self._engine.journal.flush(_FLUSH_TIMEOUT):
                    log.warning("the store does not have everything")
            except Exception:  # it may be the journal that failed
                log.exception("the store does not have everything")
        self._keeping.cancel()  # it would take the lease again
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self._leadership.release()

    async def close(self) -> None:
        """Ends all parts."""
        LEADER.set(0)
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        self._failure.cancel()
        if self._engine is not None:
            self._engine.requests.end_traces()

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

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _until_failed(self) -> None:
        await asyncio.shield(self._failure)

    async def _renew(self, engine: SchedulerEngine) -> None:
        """Keeps the records of live requests from expiring, also where each term is short."""
        while True:
            try:
                async with engine.journal.paused():  # the epoch does not change meanwhile
                    await self._store.renew([live.log.key for live in engine.requests.all], engine.epoch)
            except StoreUnavailable as error:
                log.warning("records could not be renewed", extra={"error": str(error)})
            except StaleEpoch:
                self._is_fenced.set()
            await asyncio.sleep(self._settings.record_ttl / 3)
