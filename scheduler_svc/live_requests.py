"""Requests that are live: what each has so far, and who listens to it.

A request is *held* where a scheduler has taken it over and nobody has come for it yet: its gateway may have given more
of it to a client than the store knows. It is *detached* where nobody listens any more.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.core.explain import PreemptionRecord
from scheduler_svc.core.plan import Event, FailedEvent, Failure, TokensEvent
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Request, RestoredSequence
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import Listener, LiveRequest
from scheduler_svc.metrics import REQUESTS_RESTORED
from scheduler_svc.request_log import RequestLog, SequenceLog, State
from scheduler_svc.tracing import RequestTrace
from scheduler_svc.wire import (
    end_to_proto,
    event_to_proto,
    fill_event,
    logprobs_to_proto,
    message_of,
    reason_to_proto,
    request_from_proto,
    tokens_to_proto,
)
from svc_common.durations import to_duration

_STATES = {Failure.CANCELLED: State.CANCELLED, Failure.DEADLINE_EXCEEDED: State.DEADLINE_EXCEEDED}
_MAX_ENDED = 10_000  # requests that are kept for a store that fails
_REPLACED = "the model was replaced"


@dataclass(frozen=True, slots=True)
class Graces:
    """How long a request lives without a gateway, in seconds.

    `detached`: a named request. `broken`: an unnamed request whose session broke; its gateway may reconnect.
    `recovering`: after a takeover, until the request runs. `unclaimed`: an unnamed request after a takeover, until it
    is cancelled.
    """

    detached: float = 30.0
    broken: float = 5.0
    recovering: float = 2.0
    unclaimed: float = 10.0


class LiveRequests:
    """All of them, by key. Each log that changes is noted in the journal. `wake` says that workers may have work."""

    def __init__(self, core: Scheduler, journal: Journal, graces: Graces, wake: Callable[[], None]) -> None:
        self._core = core
        self._journal = journal
        self._graces = graces
        self._wake = wake
        self._live: dict[str, LiveRequest] = {}
        self._ended: dict[str, LiveRequest] = {}  # oldest first
        self._durable: dict[Listener, list[scheduler_v1.Event]] = {}  # what is told next
        self._fingerprint = b""  # of the model that is served, or was last

    def get(self, key: str) -> LiveRequest | None:
        """The live request with this key."""
        return self._live.get(key)

    @property
    def all(self) -> Iterable[LiveRequest]:
        """Every one, oldest first."""
        return self._live.values()

    def serve(self, fingerprint: bytes) -> None:
        """Workers have this model from now on: what another one began cannot go on."""
        self._fingerprint = fingerprint
        for live in list(self._live.values()):
            if not self._is_of_model(live.log):
                self._stop(live, Failure.UNAVAILABLE, _REPLACED)
            elif not live.is_recovering:
                live.log.fingerprint = fingerprint

    def _is_of_model(self, log: RequestLog) -> bool:
        return not (self._fingerprint and log.fingerprint) or log.fingerprint == self._fingerprint

    # From the beginning to the end.

    def check(self, log: RequestLog) -> FailedEvent | None:
        """Say why a request that nobody has begun would not be taken now; None: it would."""
        now = time.monotonic()
        return self._core.check(request_from_proto(log.submit, now), now)

    def start(self, live: LiveRequest, *, is_known: bool) -> FailedEvent | None:
        """Have the core compute what the log lacks, or say why not; where it lacks nothing, the request is over.

        One that `is_known` was taken before, and no limit of a queue keeps it out.
        """
        log = live.log
        self._live[log.key] = live
        self._ended.pop(log.key, None)
        live.is_recovering = False
        live.stop_timer()
        if unflushed_tokens.is_over(log):
            self._end(live)
            return None
        if log.deadline is not None:
            log.submit.time_left.CopyFrom(to_duration(max(0.0, log.deadline - time.time())))
        if live.trace is None:
            live.trace = RequestTrace.of(log.submit.traceparent, len(log.submit.prompt_token_ids), log.submit.n)
        if not log.is_durable:
            self._journal.mark_changed(log)
        now = time.monotonic()
        refusal = self._submit(log, request_from_proto(log.submit, now), now, is_known=is_known)
        if refusal is not None:
            self._send(live, event_to_proto(refusal))
            self._end(live, refusal.reason)
        self._wake()
        return refusal

    def _submit(self, log: RequestLog, request: Request, now: float, *, is_known: bool) -> FailedEvent | None:
        if not self._is_of_model(log):
            return FailedEvent(request, Failure.UNAVAILABLE, _REPLACED)
        log.fingerprint = self._fingerprint or log.fingerprint
        return self._core.submit(request, now, _restored(log) if is_known else ())

    def recover(self, log: RequestLog) -> None:
        """Keep a request that was taken over until its gateway comes, or is not to be expected."""
        REQUESTS_RESTORED.inc()
        live = self._live[log.key] = LiveRequest(log)
        live.is_recovering = True
        live.start_timer(self._graces.recovering, self._stop_recovering)

    def _stop_recovering(self, live: LiveRequest) -> None:
        if live.log.submit.detachable:
            self.start(live, is_known=True)
            if live.log.key in self._live:
                self._detached(live)
        else:
            live.start_timer(max(0.0, self._graces.unclaimed - self._graces.recovering), self.cancel)

    def cancel(self, live: LiveRequest) -> None:
        """End a request at once; its listeners are told."""
        self._stop(live, Failure.CANCELLED, "cancelled")

    def _stop(self, live: LiveRequest, reason: Failure, message: str) -> None:
        if live.is_recovering:  # nobody listens
            self._end(live, reason)
            return
        event = self._core.cancel(live.log.key, reason, message)
        assert event is not None
        self.dispatch([event])
        self._wake()  # workers are told to forget it, and its blocks may let others in

    def truncate(self, live: LiveRequest, index: int, num_tokens: int) -> None:
        """End one sequence where its gateway found a stop string."""
        if not unflushed_tokens.truncate(live.log, index, num_tokens):
            return
        self._journal.truncate(live.log, index)
        if not live.is_recovering:
            self._core.finish(live.log.key, index, num_tokens)
        if unflushed_tokens.is_over(live.log):
            self._end(live)
        self._wake()

    def truncate_ended(self, ended: LiveRequest, index: int, num_tokens: int) -> None:
        """The same of a request that ended by itself before the verdict was here."""
        if unflushed_tokens.truncate(ended.log, index, num_tokens):
            self._journal.truncate(ended.log, index)

    def acknowledge(self, live: LiveRequest, index: int, num_tokens: int) -> None:
        """Note how far a gateway has looked for stop strings."""
        self._core.acknowledge(live.log.key, index, num_tokens)
        self._wake()

    def _end(self, live: LiveRequest, failure: Failure | None = None) -> None:
        log = live.log
        state = State.FINISHED if failure is None else _STATES.get(failure, State.FAILED)
        del self._live[log.key]
        live.stop_timer()
        if live.trace is not None:
            live.trace.end(state)
            live.trace = None
        log.state, log.ended_at = state, time.time()
        log.failure = None if failure is None else reason_to_proto(failure)
        self._journal.mark_changed(log)
        live.drop_listeners()
        self._ended.pop(log.key, None)
        self._ended[log.key] = live
        while self._ended:
            oldest = next(iter(self._ended.values())).log
            if not (len(self._ended) > _MAX_ENDED or oldest.is_durable or oldest.is_displaced):
                break
            del self._ended[oldest.key]

    def ended(self, key: str) -> LiveRequest | None:
        """A request that has ended, where the store may not know it yet."""
        return self._ended.get(key)

    # Gateways come and go.

    def resume_request(
        self, live: LiveRequest, unflushed: Iterable[scheduler_v1.UnflushedTokens], *, is_new: bool
    ) -> FailedEvent | None:
        """Have a request run from what is known and what a gateway holds of it; returns why it cannot.

        It may be live, held, new, or be recorded, and even have ended: it stays so where the gateway holds no more.
        Raises Diverged.
        """
        log, unflushed = live.log, list(unflushed)
        is_changed = self._merge(live, unflushed)
        if log.state is State.FINISHED:
            if unflushed_tokens.is_over(log):
                return None
            log.state, log.ended_at, log.is_ending_durable = State.ACCEPTED, None, False
        if self._live.get(log.key) is not live or live.is_recovering:
            return self.start(live, is_known=not is_new or bool(unflushed))
        return self._restart(live) if is_changed else None

    def _merge(self, live: LiveRequest, unflushed: Iterable[scheduler_v1.UnflushedTokens]) -> bool:
        log = live.log
        changes = unflushed_tokens.merge(log, unflushed, live.num_delivered)
        for change in changes:
            if change.is_truncated:
                self._journal.truncate(log, change.index)
            self._send(live, tokens_to_proto(log, change.index, change.offset))
        if changes:
            self._journal.mark_changed(log)
        return bool(changes)

    def _restart(self, live: LiveRequest) -> FailedEvent | None:
        """Compute anew what the log lacks: it is not what the core has."""
        self._core.cancel(live.log.key)
        return self.start(live, is_known=True)

    def leave(self, live: LiveRequest, listener: Listener, *, has_broken: bool) -> None:
        """A session takes part no more: because its clients left, or because it broke."""
        if listener not in live.listeners or not live.leave(listener):
            return
        if live.log.submit.detachable:
            self._detached(live)
        elif has_broken:
            live.start_timer(self._graces.broken, self.cancel)
        else:
            self.cancel(live)

    def _detached(self, live: LiveRequest) -> None:
        self._core.lift_stop_string_lead(live.log.key)  # it would wait for its gateway and keep its blocks
        self._wake()
        live.start_timer(self._graces.detached, self.cancel)

    # What steps bring.

    def dispatch(self, events: Seq[Event]) -> None:
        """Take in what happened, and tell whom it concerns."""
        messages: dict[Listener, scheduler_v1.SessionResponse] = {}
        ended: dict[LiveRequest, Failure | None] = {}
        for event in events:
            if isinstance(event, TokensEvent):
                live = self._live[event.sequence.request.key]
                _append(live.log, event)
                self._journal.mark_changed(live.log)
                if event.end is not None and unflushed_tokens.is_over(live.log):
                    ended[live] = None
                if live.trace is not None:
                    live.trace.on_tokens(event.sequence.num_cached or 0)
            else:
                live = self._live[event.request.key]
                ended[live] = event.reason
            for listener in live.listeners:
                message = messages.get(listener)
                if message is None:
                    message = messages[listener] = message_of()
                fill_event(message.events.add(), event)
        for live, failure in ended.items():
            self._end(live, failure)
        for listener, message in messages.items():
            listener.send(message)

    def on_admitted(self, key: str) -> None:
        """A sequence of a live request is in a step for the first time, or again."""
        trace = self._live[key].trace
        if trace is not None:
            trace.on_admitted()

    def on_preempted(self, key: str, preemption: PreemptionRecord) -> None:
        """A sequence gave up its blocks."""
        live = self._live.get(key)
        if live is not None and live.trace is not None:
            live.trace.on_preempted(preemption)

    def on_durable(self, log: RequestLog, index: int) -> None:
        """The store has more of a sequence, or its end. What it has by one batch is told together."""
        live = self._live.get(log.key)
        if live is None or not live.listeners:
            return
        event = live.durable_update(index)
        if event is None:
            return
        if not self._durable:
            asyncio.get_running_loop().call_soon(self._send_durable)
        for listener in live.listeners:
            self._durable.setdefault(listener, []).append(event)

    def _send_durable(self) -> None:
        batches, self._durable = self._durable, {}
        for listener, batch in batches.items():
            listener.send(message_of(*batch))

    def _send(self, live: LiveRequest, event: scheduler_v1.Event) -> None:
        for listener in live.listeners:
            listener.send(message_of(event))


def _restored(log: RequestLog) -> list[RestoredSequence]:
    if log.submit.HasField("beam_search"):
        return [RestoredSequence([], ended=False)]  # a search starts from its prompt
    return [RestoredSequence(list(sequence.token_ids), sequence.end is not None) for sequence in log.sequences]


def _append(log: RequestLog, event: TokensEvent) -> None:
    index = event.sequence.index
    if index == len(log.sequences):
        log.sequences.append(SequenceLog(score=event.score))  # of a search, once it is over
    sequence = log.sequences[index]
    if not sequence.token_ids:
        sequence.cached_tokens = event.sequence.num_cached or 0
    sequence.token_ids += event.token_ids
    if event.logprobs:
        sequence.logprobs += logprobs_to_proto(event.logprobs)
    if event.end is not None:
        sequence.end = end_to_proto(event.end)
