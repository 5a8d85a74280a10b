"""The one owner of the cores, one for each model: handles the commands of sessions and the results of workers.

All of it runs on the event loop's thread, and no method waits between two uses of a core, so that a core needs no lock.
"""

import asyncio
import heapq
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.budget_leases import BudgetLeases
from scheduler_svc.commands import Commands
from scheduler_svc.core.budgets import Budget, Budgets
from scheduler_svc.core.explain import Explanation, Summary, explain, summaries
from scheduler_svc.core.kv.block_hash_report import BlockHashReport, TokenChain
from scheduler_svc.core.kv.cache_reset import CacheReset, reset_prefix_cache
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import MemoryPressure, StepOutcome, StepPlan
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.leadership import Fenced
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.live_state import Graces
from scheduler_svc.metrics import BLOCKS_RESTORED, COMMIT_SECONDS, PREEMPTION_SECONDS, SCHEDULE_SECONDS
from scheduler_svc.model_versions import ModelVersion, ModelVersions, WorkerName
from scheduler_svc.request_log import RequestLog
from scheduler_svc.request_rates import RequestRates
from scheduler_svc.spending import Spending
from scheduler_svc.step_wire import highest_pressure
from scheduler_svc.store.base import Store
from svc_common.protocols import SESSION_PROTOCOLS

_TICK = 0.05  # seconds between checks of deadlines, of models without workers and of the store's state
_MAX_RAISING = 1.0  # seconds without the store in which a leader without workers waits to raise its epoch
_MAX_FAILURES = 3  # step streams in a row that broke by exceptions here, after which this scheduler cannot serve


class MaybeReplaced(Exception):  # noqa: N818
    """A worker has seen a later epoch, no worker is left, and the store does not say who leads."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`worker_timeout`: how many seconds requests are accepted after the last worker of their model is lost.
    `needs_store`: requests are refused while they cannot be recorded.
    """

    graces: Graces = field(default_factory=Graces)
    worker_timeout: float = 60.0
    needs_store: bool = False


class SchedulerEngine:
    """Requests of all sessions, over all workers of all models, for one term."""

    def __init__(
        self,
        make_core: Callable[[Budgets], Scheduler],
        store: Store,
        epoch: int,
        settings: EngineSettings,
        raise_epoch: Callable[[int], Awaitable[int]],
        on_fenced: Callable[[], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """`make_core` creates the core of a model; `raise_epoch` begins a term above a given epoch; `on_fenced` is
        called when another scheduler leads, `on_failed` when this one cannot make steps.
        """
        self.budgets = Budgets(str(epoch), self._on_tokens_available)
        self.leases = BudgetLeases(self.budgets, store, self._on_short)
        self.models = ModelVersions(partial(make_core, self.budgets), settings.worker_timeout)
        self.journal = Journal(store, epoch, on_fenced, self._on_durable, Spending(self.budgets))
        self.requests = LiveRequests(self.models, self.journal, settings.graces)
        self.set_apart: dict[str, str] = {}
        """Why workers are not used until they are restarted, by address."""
        self._sessions: list[GatewaySession] = []
        self._status_watchers: list[Callable[[scheduler_v1.Status], None]] = []
        rates = RequestRates(store, str(epoch))
        self._commands = Commands(
            self.requests, store, self.journal, self._sessions, rates, needs_store=settings.needs_store
        )
        self._raise_epoch = raise_epoch
        self._on_fenced = on_fenced
        self._on_failed = on_failed
        self._num_failures = 0  # since the last step that was committed
        self._raising_since: float | None = None  # since when it waits for the store's answer to a higher epoch
        self._models_of: dict[Replica, ModelVersion] = {}
        self._is_stopping = False
        self._step_done = asyncio.Event()
        self._sent_status = self.status

    @property
    def epoch(self) -> int:
        return self.journal.epoch

    def take_over(self, logs: Iterable[RequestLog]) -> None:
        """Takes over the requests of an earlier term. They wait for their gateways."""
        for request in logs:
            unflushed_tokens.complete(request)
            self.requests.take_over(request)

    # Sessions.

    @property
    def status(self) -> scheduler_v1.Status:
        """The status message for gateways."""
        first = self.models.first
        return scheduler_v1.Status(
            model=None if first is None else self._model_to_proto(first),
            is_store_degraded=self.journal.is_degraded,
            models=map(self._model_to_proto, self.models.listed),
            oldest_protocol=SESSION_PROTOCOLS.oldest,
            newest_protocol=SESSION_PROTOCOLS.newest,
            num_workers_set_apart=len(self.set_apart),
        )

    def _model_to_proto(self, model: ModelVersion) -> scheduler_v1.Model:
        pressures = (replica.memory_pressure for _, replica in self._named_workers(model.name))
        return model.to_proto(highest_pressure(pressures))

    def watch_status(self, watcher: Callable[[scheduler_v1.Status], None]) -> None:
        """Calls `watcher` with the status now and at each change."""
        self._status_watchers.append(watcher)
        watcher(self.status)

    def join(self, session: GatewaySession) -> None:
        self._sessions.append(session)
        session.send(scheduler_v1.SessionResponse(epoch=self.epoch, status=self.status))

    def leave(self, session: GatewaySession) -> None:
        """A session has ended: it receives no request's events any more."""
        self._sessions.remove(session)
        for live in list(self.requests.all):
            self.requests.leave(live, session, has_broken=True)

    def take(self, request: scheduler_v1.SessionRequest, session: GatewaySession) -> None:
        """Handles a gateway's command, now or as soon as the store has answered."""
        self._commands.take(request, session)

    def _on_durable(self, request: RequestLog, index: int) -> None:
        self.requests.on_durable(request, index)

    def _send_status(self) -> None:
        self._sent_status = status = self.status
        for session in self._sessions:
            session.send(scheduler_v1.SessionResponse(epoch=self.epoch, status=status))
        for watcher in self._status_watchers:
            watcher(status)

    # Inspection.

    def explain(self, key: str) -> Explanation | None:
        """The state of a request; None where no live one has this key."""
        now = time.monotonic()
        for model in self.models:
            if (explanation := explain(model.core, key, now)) is not None:
                return replace(explanation, model=model.name)
        return None

    def summaries(self, tenant: str | None) -> Iterator[Summary]:
        """A summary of each live request, of one tenant or of all, oldest first; computed lazily."""
        now = time.monotonic()
        return heapq.merge(
            *(
                (replace(summary, model=model.name) for summary in summaries(model.core, tenant, now))
                for model in self.models
            ),
            key=lambda summary: -summary.age,
        )

    def num_live(self, tenant: str | None) -> int:
        """How many requests are live, of one tenant or of all."""
        return sum(tenant in (None, live.log.submit.tenant) for live in self.requests.all)

    def reset_prefix_caches(self, model: str | None) -> Iterator[tuple[WorkerName, CacheReset]]:
        """Frees the cached blocks of each worker, of one model or of all."""
        for worker, replica in self._named_workers(model):
            yield worker, reset_prefix_cache(replica.kv)

    def worker_names(self, model: str | None) -> list[WorkerName]:
        """The workers, of one model or of all."""
        return [worker for worker, _ in self._named_workers(model)]

    def workers_short_of_memory(self, model: str | None) -> Iterator[tuple[WorkerName, MemoryPressure]]:
        """The workers whose memory is short, of one model or of all."""
        for worker, replica in self._named_workers(model):
            if replica.is_short_of_memory:
                yield worker, replica.memory_pressure

    def _named_workers(self, model: str | None) -> Iterator[tuple[WorkerName, Replica]]:
        for replica, version in self._models_of.items():
            if model in (None, version.name):
                yield WorkerName(replica.name, version.name), replica

    def is_live(self, key: str) -> bool:
        """Whether a request with this key runs, is queued, or waits for its gateway after a takeover."""
        return self.requests.get(key) is not None

    # Workers.

    def add_worker(
        self,
        replica: Replica,
        description: worker_v1.DescribeResponse,
        wake: asyncio.Event,
        hash_report: BlockHashReport,
    ) -> None:
        """A worker is ready; `wake` is set whenever there may be work for it. Cached blocks that it reports are
        restored. One that drains is the last of its version.
        """
        now = time.monotonic()
        model = self.models.for_worker(description, replica.name, now)
        BLOCKS_RESTORED.inc(replica.kv.restore_cached_blocks(hash_report, self._chains(model)))
        self._models_of[replica] = model
        replica.is_retired = description.is_draining
        model.add_worker(replica, wake, description)
        self.requests.dispatch(model.core.add_replica(replica))
        if replica.is_retired:
            model.core.supersede()
        self._update_models(now)
        model.wake()
        self._send_status()

    def retire_worker(self, replica: Replica) -> None:
        """A worker drains: it gets no new sequences, and its own move if there is another worker of its version."""
        model = self._models_of[replica]
        self.requests.dispatch(model.core.retire(replica))
        self._update_models(time.monotonic())
        model.wake()
        self._send_status()  # another version may be preferred now

    def has_left(self, replica: Replica) -> bool:
        """Whether a worker that drains has nothing left to do."""
        if not (replica.is_retired and replica.is_idle) or replica.finished_ids:
            return False
        return not (replica.is_last and self.requests.has_any(self._models_of[replica]))

    def is_awaited(self, description: worker_v1.DescribeResponse) -> bool:
        """Whether requests need a worker although it drains: no other one has the version of their tokens."""
        model = self.models.find(description.model, description.fingerprint)
        return model is not None and not model.num_workers and self.requests.has_any(model)

    def remove_worker(self, replica: Replica, *, may_have_crashed: bool = True) -> None:
        """A worker is lost; its sequences continue on other workers of its model."""
        model = self._models_of.pop(replica)
        model.remove_worker(replica, time.monotonic())
        with self._resigning_on_error():
            self.requests.dispatch(model.core.remove_replica(replica, may_have_crashed=may_have_crashed))
        self._step_done.set()
        model.wake()
        self._send_status()

    def mark_set_apart(self, address: str, why: str | None) -> None:
        """A worker is set apart, and is not used, for a reason; with None it no longer is."""
        before = self.set_apart.get(address)
        if why is None:
            self.set_apart.pop(address, None)
        else:
            self.set_apart[address] = why
        if (before is None) is not (why is None):
            self._send_status()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._models_of)

    def on_stream_failed(self, error: Exception) -> None:
        """A step stream broke by an exception of this scheduler's own.

        The workers that are left may do without what failed. If none is left, again and again, and no step is
        committed in between, this scheduler cannot serve.
        """
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES and not self._models_of:
            self._on_failed(error)

    @contextmanager
    def _resigning_on_error(self) -> Iterator[None]:
        """Ends the term if an exception is raised here: the core may have changed, and the logs have not. The next term
        rebuilds both from records and gateways.
        """
        try:
            yield
        except Exception as error:
            self._is_stopping = True  # a further step could send tokens that do not follow those of the log
            self._on_failed(error)
            raise

    def _update_models(self, now: float) -> None:
        """Moves requests to versions that serve, fails those of versions without workers, and drops such versions."""
        for version in list(self.models):
            if self.models.is_superseded(version):
                self.requests.move(version)
                if version.core.supersede():
                    version.wake()
            if self.models.is_gone(version, now):
                self.requests.end_all(version)
                self.models.discard(version)
            elif version.description is None and not self.requests.has_any(version):
                self.models.discard(version)
        if self.models.expire(now):
            self._send_status()

    async def on_higher_epoch(self, epoch: int) -> None:
        """A worker has seen this later epoch: begin a term above it, unless another scheduler leads.

        Raises EpochOutsideWindow where no leader can have begun that epoch.
        """
        try:
            async with self.journal.paused():
                self._raising_since = time.monotonic()
                try:
                    self.journal.epoch = await self._raise_epoch(epoch)
                finally:
                    self._raising_since = None
        except Fenced:
            self._on_fenced()

    def _check_raising(self, now: float) -> None:
        """Resigns if another scheduler leads, as far as can be known without the store: gateways would wait here for
        steps that the other one makes.
        """
        since = self._raising_since
        if since is not None and now - since > _MAX_RAISING and self.journal.is_degraded and not self._models_of:
            self._on_failed(MaybeReplaced("a worker has seen a later epoch, and the store cannot be reached"))

    def _chains(self, model: ModelVersion) -> Iterator[TokenChain]:
        """The tokens of a model's live requests, to match with the block hashes of a worker."""
        for live in self.requests.all:
            if live.log.model not in ("", model.name):
                continue
            submit = live.log.submit
            yield TokenChain(submit.cache_salt, submit.prompt_token_ids, [one.token_ids for one in live.log.sequences])

    # Token budgets.

    def _on_tokens_available(self) -> None:
        """An account has more tokens available: what it could not pay for may run, at any worker of any model."""
        for model in self.models:
            model.wake()

    def _on_short(self, budget: Budget) -> None:
        """An account's bucket has too little: requests end that cannot be paid before their deadlines."""
        now = time.monotonic()
        for model in self.models:
            expired = model.core.expire_unpaid(budget, now)
            if expired:
                self.requests.dispatch(expired)
                model.wake()

    # Steps.

    def schedule(self, replica: Replica) -> StepPlan | None:
        """The replica's next step, if any. Requests past their deadline are ended first."""
        if self._is_stopping:
            return None
        now, model = time.monotonic(), self._models_of[replica]
        self._expire(model, now)
        with SCHEDULE_SECONDS.time():
            plan = model.core.schedule(replica, now)
        model.wake_placed()
        if self.budgets.has_new_demand:
            self.leases.wake()
        if plan is not None:
            for sequence in plan.preempted:
                self._record_preemption(model, sequence)
            for new in plan.new_sequences:
                self.requests.on_admitted(new.sequence)
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        """Applies the outcome of a step, and sends its events. Raises ValueError where it is not the step's."""
        model = self._models_of[replica]
        with self._resigning_on_error():
            with COMMIT_SECONDS.time():
                events = model.core.commit(replica, outcome, time.monotonic())
            self.requests.dispatch(events)
        self._num_failures = 0
        self._step_done.set()
        if model.num_workers > 1:
            model.wake()  # a sequence that was preempted here may run there

    async def watch(self) -> None:
        """Until cancelled, end requests whose deadline has passed, update models without workers, and send changes of
        the store's state and of the workers' memory.
        """
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            for model in self.models:
                self._expire(model, now)
            self._update_models(now)
            self._check_raising(now)
            if self.status != self._sent_status:
                self._send_status()

    def _expire(self, model: ModelVersion, now: float) -> None:
        expired = model.core.expire(now)
        if expired:
            self.requests.dispatch(expired)
            model.wake()

    async def stop(self, seconds: float) -> None:
        """Begins no more steps, and waits up to `seconds` for those in flight."""
        self._is_stopping = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(replica.steps_in_flight for replica in self._models_of):
                    self._step_done.clear()
                    await self._step_done.wait()

    def _record_preemption(self, model: ModelVersion, sequence: Sequence) -> None:
        preemption = sequence.last_preemption
        if preemption is None:
            return
        if math.isfinite(preemption.swap_seconds):  # else there is no host memory to swap to
            PREEMPTION_SECONDS.labels(model.name, "swap").observe(preemption.swap_seconds)
        PREEMPTION_SECONDS.labels(model.name, "recompute").observe(preemption.recompute_seconds)
        self.requests.on_preempted(sequence.request.key, preemption)
