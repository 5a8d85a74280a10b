"""The one owner of the core: takes commands from sessions and results from workers, and tells sessions the events.

Everything here runs on the event loop's thread and none of it waits, so that the core needs no lock.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.explain import Explanation, Summary
from scheduler_svc.core.inquiry import explain, summaries
from scheduler_svc.core.plan import Event, Failure, StepOutcome, StepPlan, TokensEvent
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.metrics import PREEMPTION_SECONDS, STEP_SECONDS
from scheduler_svc.records import RecordWriter, State
from scheduler_svc.tracing import RequestTrace
from scheduler_svc.wire import event_to_proto, failed_to_proto, request_from_proto

_STATES = {Failure.CANCELLED: State.CANCELLED, Failure.DEADLINE_EXCEEDED: State.DEADLINE_EXCEEDED}
_DEADLINE_TICK = 0.05  # seconds between looks at the deadlines


class Listener(Protocol):
    """A session: what the engine tells a gateway."""

    def tell(self, events: list[scheduler_v1.Event]) -> None:
        """Pass on events, all of one step at once."""

    def tell_status(self, status: scheduler_v1.Status) -> None:
        """Pass on a change of what is served."""


class _Live:
    """What the engine keeps of a live request beside the core."""

    __slots__ = ("detachable", "grace", "listener", "submission_id", "trace")

    def __init__(self, submit: scheduler_v1.Submit, listener: Listener) -> None:
        self.listener: Listener | None = listener
        self.submission_id = submit.submission_id
        self.detachable = submit.detachable
        self.grace: asyncio.TimerHandle | None = None
        self.trace = RequestTrace.of(submit.traceparent, len(submit.prompt_token_ids), submit.n)


@dataclass(slots=True)
class _Reservation:
    """A key whose request is being recorded."""

    submission_id: str
    listener: Listener
    cancelled: bool = False


class Engine:
    """Requests of all sessions, over all workers. `epoch` is the scheduler's term."""

    def __init__(self, core: Scheduler, writer: RecordWriter, detach_grace: float) -> None:
        self.core = core
        self.epoch = time.time_ns() // 1000
        self._writer = writer
        self._detach_grace = detach_grace
        self._live: dict[str, _Live] = {}
        self._reserved: dict[str, _Reservation] = {}  # by key, while their records are written
        self._listeners: list[Listener] = []
        self._workers: list[tuple[Replica, worker_v1.DescribeResponse, asyncio.Event]] = []

    # Sessions.

    @property
    def status(self) -> scheduler_v1.Status:
        """What is served now."""
        if not self._workers:
            return scheduler_v1.Status()
        about = self._workers[0][1]
        return scheduler_v1.Status(
            model=scheduler_v1.Model(
                name=about.model,
                tokenizer_fingerprint=about.tokenizer_fingerprint,
                context_length=self.core.context_length,
                vocab_size=about.vocab_size,
            )
        )

    def join(self, listener: Listener) -> None:
        """A session begins."""
        self._listeners.append(listener)
        listener.tell_status(self.status)

    def leave(self, listener: Listener) -> None:
        """A session is over: all its requests are detached."""
        self._listeners.remove(listener)
        for key in [key for key, live in self._live.items() if live.listener is listener]:
            self.detach(key, listener)

    def explain(self, key: str) -> Explanation | None:
        """Where a request stands; None where no live one has this key."""
        return explain(self.core, key, time.monotonic())

    def summaries(self, tenant: str | None) -> Iterator[Summary]:
        """Live requests in a line each, of one tenant or of all, oldest first; made as they are read."""
        return summaries(self.core, tenant, time.monotonic())

    def num_live(self, tenant: str | None) -> int:
        """How many requests are live, of one tenant or of all."""
        if tenant is None:
            return len(self._live)
        return sum(self.core.sequences(key)[0].request.tenant == tenant for key in self._live)

    def is_live(self, key: str) -> bool:
        """Whether a request runs or waits under this key."""
        return key in self._live

    def reserve(self, submit: scheduler_v1.Submit, listener: Listener) -> bool:
        """Keep a key for a request that is about to be recorded, or answer it at once: False."""
        reservation = self._reserved.get(submit.key)
        if reservation is not None and reservation.submission_id == submit.submission_id:
            reservation.listener = listener  # its gateway came back by another session
        elif reservation is not None:
            _refuse(submit, listener, Failure.KEY_IN_USE, "a request with this id is being accepted")
        elif self._is_refused(submit, listener):
            return False
        else:
            self._reserved[submit.key] = _Reservation(submit.submission_id, listener)
            return True
        return False

    def _is_refused(self, submit: scheduler_v1.Submit, listener: Listener) -> bool:
        """Whether a live request stands in the way; its listener is told."""
        live = self._live.get(submit.key)
        if live is None:
            return False
        if live.submission_id != submit.submission_id:
            _refuse(submit, listener, Failure.KEY_IN_USE, "a request with this id is running")
            return True
        if live.listener is listener:
            listener.tell([scheduler_v1.Event(key=submit.key, accepted=scheduler_v1.Accepted())])
            return True
        # The session broke before its gateway knew of the acceptance: nobody was given anything, it starts over.
        live.listener = None
        self._dispatch([self.core.cancel(submit.key)])
        return False

    def submit(self, submit: scheduler_v1.Submit, *, recorded: bool) -> None:
        """Queue a request whose key is reserved, if its record could be had; its listener is told."""
        reservation = self._reserved.pop(submit.key)
        listener = reservation.listener
        if not recorded:
            _refuse(submit, listener, Failure.KEY_IN_USE, "a request with this id has finished")
            return
        if reservation.cancelled:
            _refuse(submit, listener, Failure.CANCELLED, "cancelled")
            self._writer.end(submit.key, submit.submission_id, State.CANCELLED)
            return
        now = time.monotonic()
        refusal = self.core.submit(request_from_proto(submit, now), now)
        if refusal is not None:
            listener.tell([event_to_proto(refusal)])
            self._writer.end(submit.key, submit.submission_id, State.FAILED)
            return
        self._live[submit.key] = _Live(submit, listener)
        listener.tell([scheduler_v1.Event(key=submit.key, accepted=scheduler_v1.Accepted())])
        if listener not in self._listeners:
            self.detach(submit.key, listener)  # its session broke in the meantime
        self._wake()

    def refuse(self, submit: scheduler_v1.Submit, listener: Listener) -> None:
        """Say of a request that was recorded that a fault of ours keeps it from running."""
        self.core.cancel(submit.key)
        self._live.pop(submit.key, None)
        self._writer.end(submit.key, submit.submission_id, State.FAILED)
        _refuse(submit, listener, Failure.INTERNAL, "the request could not be taken")

    def cancel(self, key: str, submission_id: str | None = None) -> None:
        """End a request at once, or only if it came by this submission; its listener is told."""
        holder = self._reserved.get(key) or self._live.get(key)
        if holder is None or submission_id not in (None, holder.submission_id):
            return
        if isinstance(holder, _Reservation):
            holder.cancelled = True
            return
        self._dispatch([self.core.cancel(key)])
        self._wake()  # workers are told to forget it, and its blocks may let others in

    def detach(self, key: str, listener: Listener) -> None:
        """The request's own listener is gone: a named request runs on for the grace, any other ends."""
        live = self._live.get(key)
        if live is None or live.listener is not listener:
            return
        live.listener = None
        if not live.detachable:
            self.cancel(key)
            return
        self.core.lift_stop_lead(key)  # it would wait for its gateway and keep its blocks
        self._wake()
        live.grace = asyncio.get_running_loop().call_later(self._detach_grace, self.cancel, key)

    def finish(self, key: str, index: int, num_tokens: int, listener: Listener) -> None:
        """End one sequence where its gateway found a stop string."""
        if self._is_listener(key, listener):
            self.core.finish(key, index, num_tokens)
            self._forget_if_over(key, State.FINISHED)
            self._wake()

    def acknowledge(self, key: str, index: int, num_tokens: int, listener: Listener) -> None:
        """Note how far a gateway has looked for stop strings."""
        if self._is_listener(key, listener):
            self.core.acknowledge(key, index, num_tokens)
            self._wake()

    def _is_listener(self, key: str, listener: Listener) -> bool:
        live = self._live.get(key)
        return live is not None and live.listener is listener

    # Workers.

    def add_worker(self, replica: Replica, about: worker_v1.DescribeResponse, wake: asyncio.Event) -> None:
        """A worker is ready; `wake` is set whenever there may be work for it."""
        self._workers.append((replica, about, wake))
        self._dispatch(self.core.add_replica(replica))
        self._wake()
        self._tell_status()

    def remove_worker(self, replica: Replica) -> None:
        """A worker is gone; its sequences go on elsewhere."""
        self._workers = [worker for worker in self._workers if worker[0] is not replica]
        self._dispatch(self.core.remove_replica(replica))
        self._wake()
        self._tell_status()

    def schedule(self, replica: Replica) -> StepPlan | None:
        """The replica's next step, if there is any. What is past its deadline is not in it."""
        now = time.monotonic()
        self._dispatch(self.core.expire(now))
        with STEP_SECONDS.labels("schedule").time():
            plan = self.core.schedule(replica, now)
        if plan is not None:
            for sequence in plan.preempted:
                self._tell_preemption(sequence)
            for new in plan.introductions:
                if new.sequence.is_one_of_beams:
                    continue
                trace = self._live[new.sequence.request.key].trace
                if trace is not None:
                    trace.admitted()
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        """Take in what came of a step and tell whom it concerns. Raises ValueError where it is not the step's."""
        with STEP_SECONDS.labels("commit").time():
            events = self.core.commit(replica, outcome, time.monotonic())
        self._dispatch(events)
        if len(self._workers) > 1:
            self._wake()  # what was preempted here may run elsewhere

    async def watch_deadlines(self) -> None:
        """End requests whose deadline passes, until cancelled."""
        while True:
            await asyncio.sleep(_DEADLINE_TICK)
            expired = self.core.expire(time.monotonic())
            if expired:
                self._dispatch(expired)
                self._wake()

    # How it is done.

    def _tell_preemption(self, sequence: Sequence) -> None:
        weighed, live = sequence.last_preemption, self._live.get(sequence.request.key)
        if weighed is None:
            return
        if math.isfinite(weighed.swap_seconds):  # else there is nowhere to swap to
            PREEMPTION_SECONDS.labels("swap").observe(weighed.swap_seconds)
        PREEMPTION_SECONDS.labels("recompute").observe(weighed.recompute_seconds)
        if live is not None and live.trace is not None:
            live.trace.gave_way(weighed)

    def _wake(self) -> None:
        for _, _, wake in self._workers:
            wake.set()

    def _tell_status(self) -> None:
        for listener in self._listeners:
            listener.tell_status(self.status)

    def _dispatch(self, events: Seq[Event | None]) -> None:
        batches: dict[Listener, list[scheduler_v1.Event]] = {}
        states: dict[str, State] = {}
        for event in events:
            if event is None:
                continue
            if isinstance(event, TokensEvent):
                key, state = event.sequence.request.key, State.FINISHED
            else:
                key, state = event.request.key, _STATES.get(event.reason, State.FAILED)
            live = self._live[key]
            states[key] = state
            if live.listener is not None:
                batches.setdefault(live.listener, []).append(event_to_proto(event))
            if live.trace is not None and isinstance(event, TokensEvent):
                live.trace.grew(event.sequence.num_cached or 0)
        for key, state in states.items():
            self._forget_if_over(key, state)
        for listener, batch in batches.items():
            listener.tell(batch)

    def _forget_if_over(self, key: str, state: State) -> None:
        live = self._live.get(key)
        if live is None or self.core.is_live(key):
            return
        del self._live[key]
        if live.grace is not None:
            live.grace.cancel()
        if live.trace is not None:
            live.trace.end(state)
        self._writer.end(key, live.submission_id, state)


def _refuse(submit: scheduler_v1.Submit, listener: Listener, reason: Failure, message: str) -> None:
    listener.tell([failed_to_proto(submit.key, reason, message)])
