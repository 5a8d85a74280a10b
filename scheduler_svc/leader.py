"""A scheduler's life: it waits for the lease, leads for a term, and hands over, or resigns and waits again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.leadership import Fenced, Leadership
from scheduler_svc.metrics import RESIGNATIONS
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import Store
from scheduler_svc.term import PartFailed, Term
from svc_common.identity import PLAIN, Outbound

log = logging.getLogger("quire.scheduler")

_COMMIT_TIMEOUT = 1.0  # seconds to wait for steps in flight at the end
_MIN_PAUSE = 1.0  # seconds from a resignation until this scheduler is a candidate again: a standby goes first
_MAX_PAUSE = 60.0  # the pause doubles with each term that fails, up to this; a term that lasted as long resets it


class Leader:
    """One scheduler, from its candidacy to its end. `holder` is its unique name.

    `on_lead` gives the engine of a term to the servers, `on_resign` takes it from them: the term has failed.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        holder: str,
        on_lead: Callable[[SchedulerEngine], Awaitable[None]],
        on_resign: Callable[[PartFailed], Awaitable[None]],
        to_workers: Outbound = PLAIN,
    ) -> None:
        self._settings = settings
        # Read at start-up: a standby may lead long after the package of its policy was replaced on disk.
        self._limits = settings.limits
        self._store = store
        self._holder = holder
        self._on_lead = on_lead
        self._on_resign = on_resign
        self._term: Term | None = None
        self._pause = _MIN_PAUSE
        self._to_workers = to_workers

    async def run(self) -> None:
        """Waits for the lease and leads, until another scheduler has taken over.

        If a part of this scheduler fails, it resigns: it releases the lease and is a candidate again after a pause.
        """
        while True:
            leadership = Leadership(self._store, self._holder, self._settings.lease_seconds)
            epoch = await leadership.acquire(self._settings.standby)
            log.info("leading", extra={"epoch": epoch})
            begun = time.monotonic()
            term = self._term = Term(
                self._settings, self._limits, self._store, leadership, self._on_lead, self._to_workers
            )
            try:
                await term.run()
            except Fenced as error:
                log.critical("fenced", extra={"why": str(error)})
                return
            except PartFailed as error:
                if time.monotonic() - begun >= _MAX_PAUSE:
                    self._pause = _MIN_PAUSE
                await self._resign(term, error)
            finally:
                self._term = None
                await term.close()
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _MAX_PAUSE)

    async def _resign(self, term: Term, error: PartFailed) -> None:
        log.critical("resigned", extra={"part": error.part, "pause": self._pause}, exc_info=error.error)
        RESIGNATIONS.labels(error.part, type(error.error).__name__).inc()
        await self._on_resign(error)
        await term.hand_over(0.0)

    async def hand_over(self) -> None:
        """Writes everything that is committed, and releases the lease. To be called while `run` runs."""
        if self._term is not None:
            await self._term.hand_over(_COMMIT_TIMEOUT)
