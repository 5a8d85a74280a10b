"""The one owner of the core: takes commands from sessions and results from workers, and tells sessions the events.

Everything here runs on the event loop's thread and none of it waits, so that the core needs no lock.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.commands import Commands
from scheduler_svc.core.block_hash_report import BlockHashReport, TokenChain
from scheduler_svc.core.explain import Explanation, Summary
from scheduler_svc.core.inquiry import explain, summaries
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal import Journal
from scheduler_svc.leadership import Fenced
from scheduler_svc.live_request import Listener
from scheduler_svc.live_requests import Graces, LiveRequests
from scheduler_svc.metrics import BLOCKS_RESTORED, COMMIT_SECONDS, PREEMPTION_SECONDS, SCHEDULE_SECONDS
from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import Store

_TICK = 0.05  # seconds between looks at the deadlines and at the store's state


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`worker_timeout`: seconds for which requests are taken once no worker is left. `needs_store`: they are refused
    while they cannot be recorded.
    """

    graces: Graces = field(default_factory=Graces)
    worker_timeout: float = 60.0
    needs_store: bool = False


class SchedulerEngine:
    """Requests of all sessions, over all workers, for one term."""

    def __init__(
        self,
        core: Scheduler,
        store: Store,
        epoch: int,
        settings: EngineSettings,
        raise_epoch: Callable[[int], Awaitable[int]],
        on_fenced: Callable[[], None],
    ) -> None:
        """`raise_epoch` begins a term above a given epoch; `on_fenced` hears that another scheduler leads."""
        self.core = core
        self.journal = Journal(store, epoch, on_fenced, self._on_durable)
        self.requests = LiveRequests(core, self.journal, settings.graces, self._wake)
        self._listeners: list[Listener] = []
        self._commands = Commands(
            self.requests, store, self.journal, self._listeners.__contains__, needs_store=settings.needs_store
        )
        self._worker_timeout = settings.worker_timeout
        self._raise_epoch = raise_epoch
        self._on_fenced = on_fenced
        self._workers: dict[Replica, asyncio.Event] = {}
        self._served_model: worker_v1.DescribeResponse | None = None  # of a worker that is there, or was a while ago
        self._worker_timer: asyncio.TimerHandle | None = None
        self._was_degraded = False
        self._is_stopping = False
        self._step_done = asyncio.Event()

    @property
    def epoch(self) -> int:
        """The scheduler's term."""
        return self.journal.epoch

    def restore(self, logs: Iterable[RequestLog]) -> None:
        """Take over requests as a former term left them. They are held until their gateways come."""
        for request in logs:
            unflushed_tokens.complete(request)
            self.requests.recover(request)

    # Sessions.

    @property
    def status(self) -> scheduler_v1.Status:
        """What is served now."""
        status = scheduler_v1.Status(is_store_degraded=self.journal.is_degraded)
        if self._served_model is not None:
            status.model.name = self._served_model.model
            status.model.tokenizer_fingerprint = self._served_model.tokenizer_fingerprint
            status.model.context_length = self.core.context_length
            status.model.vocab_size = self._served_model.vocab_size
        return status

    def join(self, listener: Listener) -> None:
        """A session begins."""
        self._listeners.append(listener)
        listener.send_status(self.status)

    def leave(self, listener: Listener) -> None:
        """A session is over: it takes part in no request any more."""
        self._listeners.remove(listener)
        for live in list(self.requests.all):
            self.requests.leave(live, listener, has_broken=True)

    def take(self, request: scheduler_v1.SessionRequest, listener: Listener) -> None:
        """Carry out what a gateway asks, now or as soon as the store has answered."""
        self._commands.take(request, listener)

    def _on_durable(self, request: RequestLog, index: int) -> None:
        self.requests.on_durable(request, index)

    def _send_status(self) -> None:
        for listener in self._listeners:
            listener.send_status(self.status)

    # Whoever asks.

    def explain(self, key: str) -> Explanation | None:
        """Where a request stands; None where no live one has this key."""
        return explain(self.core, key, time.monotonic())

    def summaries(self, tenant: str | None) -> Iterator[Summary]:
        """Live requests in a line each, of one tenant or of all, oldest first; made as they are read."""
        return summaries(self.core, tenant, time.monotonic())

    def num_live(self, tenant: str | None) -> int:
        """How many requests are live, of one tenant or of all."""
        return sum(tenant in (None, live.log.submit.tenant) for live in self.requests.all)

    def is_live(self, key: str) -> bool:
        """Whether a request runs, waits or is held under this key."""
        return self.requests.get(key) is not None

    # Workers.

    def add_worker(
        self,
        replica: Replica,
        description: worker_v1.DescribeResponse,
        wake: asyncio.Event,
        hash_report: BlockHashReport,
    ) -> None:
        """A worker is ready; `wake` is set whenever there may be work for it. What it still holds is taken up."""
        self.requests.serve(replica.shape.fingerprint)
        BLOCKS_RESTORED.inc(replica.restore_cached_blocks(hash_report, self._chains()))
        self._workers[replica] = wake
        self._served_model = description
        if self._worker_timer is not None:
            self._worker_timer.cancel()
            self._worker_timer = None
        self.requests.dispatch(self.core.add_replica(replica))
        self._wake()
        self._send_status()

    def retire_worker(self, replica: Replica) -> None:
        """A worker is about to end: it takes nothing more, and what it has goes elsewhere if there is another."""
        self.core.retire(replica)
        self._wake()

    def remove_worker(self, replica: Replica) -> None:
        """A worker is gone; its sequences go on elsewhere."""
        del self._workers[replica]
        self.requests.dispatch(self.core.remove_replica(replica))
        self._step_done.set()
        if not self._workers and self._worker_timer is None:
            self._worker_timer = asyncio.get_running_loop().call_later(self._worker_timeout, self._on_worker_timeout)
        self._wake()
        self._send_status()

    def _on_worker_timeout(self) -> None:
        self._served_model = self._worker_timer = None
        self._send_status()

    async def on_higher_epoch(self, epoch: int) -> None:
        """A worker has served this term, which is later than ours: ours becomes a later one yet, if it may."""
        try:
            async with self.journal.paused():
                self.journal.epoch = await self._raise_epoch(epoch)
        except Fenced:
            self._on_fenced()

    def _chains(self) -> Iterator[TokenChain]:
        """The tokens of all live requests, by which a worker's blocks are known again."""
        for live in self.requests.all:
            submit = live.log.submit
            yield TokenChain(submit.cache_salt, submit.prompt_token_ids, [one.token_ids for one in live.log.sequences])

    def _wake(self) -> None:
        for wake in self._workers.values():
            wake.set()

    # Steps.

    def schedule(self, replica: Replica) -> StepPlan | None:
        """The replica's next step, if there is any. What is past its deadline is not in it."""
        if self._is_stopping:
            return None
        now = time.monotonic()
        self._expire(now)
        with SCHEDULE_SECONDS.time():
            plan = self.core.schedule(replica, now)
        for other in self.core.take_placed():
            self._workers[other].set()
        if plan is not None:
            for sequence in plan.preempted:
                self._record_preemption(sequence)
            for new in plan.new_sequences:
                if not new.sequence.is_one_of_beams:
                    self.requests.on_admitted(new.sequence.request.key)
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        """Take in what came of a step and tell whom it concerns. Raises ValueError where it is not the step's."""
        with COMMIT_SECONDS.time():
            events = self.core.commit(replica, outcome, time.monotonic())
        self.requests.dispatch(events)
        self._step_done.set()
        if len(self._workers) > 1:
            self._wake()  # what was preempted here may run elsewhere

    async def watch(self) -> None:
        """End requests whose deadline passes, and tell of the store's state where it changes; until cancelled."""
        while True:
            await asyncio.sleep(_TICK)
            self._expire(time.monotonic())
            if self.journal.is_degraded is not self._was_degraded:
                self._was_degraded = not self._was_degraded
                self._send_status()

    def _expire(self, now: float) -> None:
        expired = self.core.expire(now)
        if expired:
            self.requests.dispatch(expired)
            self._wake()

    async def stop(self, seconds: float) -> None:
        """Begin no more steps, and wait for those in flight, but no longer than so many seconds."""
        self._is_stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(replica.in_flight for replica in self._workers):
                    self._step_done.clear()
                    await self._step_done.wait()

    def _record_preemption(self, sequence: Sequence) -> None:
        preemption = sequence.last_preemption
        if preemption is None:
            return
        if math.isfinite(preemption.swap_seconds):  # else there is nowhere to swap to
            PREEMPTION_SECONDS.labels("swap").observe(preemption.swap_seconds)
        PREEMPTION_SECONDS.labels("recompute").observe(preemption.recompute_seconds)
        self.requests.on_preempted(sequence.request.key, preemption)
