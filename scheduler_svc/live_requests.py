"""All requests of this term by key: starts and ends them, sends their events to gateways, and enforces their timeouts.

A request with tokens stays in the core of its version of the model, since they depend on it. One without tokens moves
when the version is replaced.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_svc import unflushed_tokens
from scheduler_svc.attachment_room import AttachmentRoom
from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Event, FailedEvent, Failure, PromptLogprobsEvent, TokensEvent
from scheduler_svc.core.request import PreemptionRecord, Sequence
from scheduler_svc.durable_updates import DurableUpdates
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.journal import Journal
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.live_state import Graces, LiveEvent, LiveState
from scheduler_svc.metrics import REQUESTS_TAKEN_OVER
from scheduler_svc.model_versions import ModelVersion, ModelVersions
from scheduler_svc.request_log import RecordState, RequestLog, State
from scheduler_svc.session_wire import (
    event_to_proto,
    fill_event,
    message_of,
    prompt_logprobs_to_proto,
    prompt_paid_to_proto,
    reason_to_proto,
    tokens_to_proto,
)
from scheduler_svc.tracing import RequestTrace

logger = logging.getLogger("quire.scheduler")

_STATES = {Failure.CANCELLED: State.CANCELLED, Failure.DEADLINE_EXCEEDED: State.DEADLINE_EXCEEDED}
_REPLACED = "the model was replaced"


class LiveRequests:
    """Live requests, and those whose end is not recorded yet. The journal is given each change."""

    def __init__(self, models: ModelVersions, journal: Journal, graces: Graces) -> None:
        self._models = models
        self._journal = journal
        self._live: dict[str, LiveRequest] = {}
        self._ended: dict[str, LiveRequest] = {}  # oldest first
        self.attachments = AttachmentRoom()
        self._durable = DurableUpdates(lambda: journal.epoch)
        self._timeouts: Mapping[LiveState, tuple[float, Callable[[LiveRequest], None]]] = {
            LiveState.TAKEN_OVER: (graces.taken_over, self._takeover_expired),
            LiveState.UNCLAIMED: (max(0.0, graces.unclaimed - graces.taken_over), self._gateway_lost),
            LiveState.DETACHED: (graces.detached, self.cancel),
            LiveState.BROKEN: (graces.broken, self._gateway_lost),
        }

    def get(self, key: str) -> LiveRequest | None:
        """The live request with this key."""
        return self._live.get(key)

    def ended(self, key: str) -> LiveRequest | None:
        """The request with this key that has ended, if the store may not know its end yet."""
        ended = self._ended.get(key)
        has_none = ended is None or ended.log.is_durable or ended.log.record is RecordState.DELETED
        return None if has_none else ended

    @property
    def all(self) -> Iterable[LiveRequest]:
        """Every live request, oldest first."""
        return self._live.values()

    def _advance(self, live: LiveRequest, event: LiveEvent) -> None:
        if live.advance(event) and live.state in self._timeouts and not live.runs_in_background:
            live.start_timer(*self._timeouts[live.state])

    # Models.

    def move(self, old: ModelVersion) -> None:
        """Runs requests without tokens on the version that serves their tokenizer, if there is one.

        What that version would refuse, for example as longer than its context, runs on the last worker of the old one.
        """
        now = time.monotonic()
        for live in list(self._live.values()):
            if live.model is not old or not live.is_running or live.log.fingerprint:
                continue
            new = self._models.replacement(old, live.log.submit.tokenizer_fingerprint)
            if new is None:
                continue
            if not old.num_workers or new.core.check(live.request_at(now), now, is_restored=True) is None:
                self._restart(live)

    def end_all(self, version: ModelVersion) -> None:
        """Fails the requests of a version that no worker has any more."""
        for live in list(self._live.values()):
            if live.model is version and (live.log.fingerprint or live.is_running):
                self._stop(live, Failure.UNAVAILABLE, _REPLACED)

    def end_traces(self) -> None:
        """Ends the spans of all requests: this scheduler's term has ended, and another one goes on with them."""
        for live in self._live.values():
            if live.trace is not None:
                live.trace.end("handed_over")
                live.trace = None

    def _version_of(self, log: RequestLog, now: float) -> ModelVersion:
        return self._models.for_request(log.model, log.submit.tokenizer_fingerprint, log.fingerprint, now)

    def has_any(self, version: ModelVersion) -> bool:
        """Whether any request runs on a version, or waits for it."""
        return any(live.model is version for live in self._live.values())

    # Start.

    def check(self, live: LiveRequest) -> FailedEvent | None:
        """Why a new request would be refused now; None: it would be accepted. Nothing changes."""
        now = time.monotonic()
        model = self._version_of(live.log, now)
        return self._refuse_tokenizer(live, model, is_new=True) or model.core.check(live.request_at(now), now)

    def take_over(self, log: RequestLog) -> None:
        """Keeps a request of an earlier term until a gateway attaches, or the grace has passed."""
        REQUESTS_TAKEN_OVER.inc()
        live = self._live[log.key] = LiveRequest(log)
        self.attachments.hold(log)
        self._journal.keep(log)
        live.model = self._version_of(log, time.monotonic())
        self._advance(live, LiveEvent.TAKE_OVER)

    def _takeover_expired(self, live: LiveRequest) -> None:
        if not live.log.submit.detachable:
            self._advance(live, LiveEvent.EXPIRE)
            return
        self.start(live, is_restored=True)
        if live.is_running:
            self._detach(live)

    def start(self, live: LiveRequest, *, is_restored: bool) -> FailedEvent | None:
        """Lets the core compute what the log lacks, or returns why it refuses; ends a request that lacks nothing.

        A request that `is_restored` was accepted before: what its log has is restored, and no limit of a queue applies.
        """
        self._drop_ended(live.log.key)
        live.awaiting_end = ()
        self._live[live.log.key] = live
        self.attachments.hold(live.log)
        self._advance(live, LiveEvent.START)
        return self._submit(live, is_restored=is_restored)

    def _restart(self, live: LiveRequest) -> FailedEvent | None:
        """Lets the core compute what the log lacks now, instead of what it was given before."""
        if live.model is not None:
            live.model.core.cancel(live.log.key)
            live.model.wake()  # it may have been the last one there
        return self._submit(live, is_restored=True)

    def _submit(self, live: LiveRequest, *, is_restored: bool) -> FailedEvent | None:
        log = live.log
        if unflushed_tokens.is_over(log):
            self._end(live)
            return None
        if live.trace is None:
            live.trace = RequestTrace.of(log.submit.traceparent, len(log.submit.prompt_token_ids), log.submit.n)
        self._journal.keep(log)
        now = time.monotonic()
        model = live.model = self._version_of(log, now)
        if not log.fingerprint and any(sequence.token_ids for sequence in log.sequences):
            log.fingerprint = model.fingerprint
        refusal = self._refuse_tokenizer(live, model, is_new=not is_restored)
        refusal = refusal or self._queue(live, model, now, is_restored=is_restored)
        if refusal is not None:
            self._send(live, event_to_proto(refusal))
            self._end(live, refusal.reason)
        elif live.state is LiveState.DETACHED:
            model.core.lift_stop_string_lead(log.key)
        model.wake()
        return refusal

    def _queue(self, live: LiveRequest, model: ModelVersion, now: float, *, is_restored: bool) -> FailedEvent | None:
        """Queues a request, or returns why not: it fails if the policy does, which may be another package's."""
        request = live.request_at(now)
        try:
            return model.core.submit(request, now, live.restored() if is_restored else ())
        except Exception:
            logger.exception("a request could not be queued", extra={"request_id": request.key})
            model.core.cancel(request.key)
            return FailedEvent(request, Failure.INTERNAL, "the request could not be queued")

    def _refuse_tokenizer(self, live: LiveRequest, model: ModelVersion, *, is_new: bool) -> FailedEvent | None:
        """Refuses a request whose token ids are another tokenizer's."""
        if self._models.has_tokenizer(model, live.log.submit.tokenizer_fingerprint, is_new=is_new):
            return None
        return FailedEvent(live.request_at(time.monotonic()), Failure.UNAVAILABLE, _REPLACED)

    def resume_request(
        self, live: LiveRequest, unflushed: Iterable[scheduler_v1.UnflushedTokens], *, is_new: bool
    ) -> FailedEvent | None:
        """Runs a request from its log and a gateway's unflushed tokens, or returns why it is refused.

        One that has ended stays so unless the gateway has tokens beyond its end. Raises Diverged.
        """
        log, unflushed = live.log, list(unflushed)
        is_changed = self._merge(live, unflushed)
        if log.state is State.FINISHED:
            if unflushed_tokens.is_over(log):
                return None
            log.reopen()
        if not live.is_running:
            return self.start(live, is_restored=not is_new)
        return self._restart(live) if is_changed else None

    def _merge(self, live: LiveRequest, unflushed: Iterable[scheduler_v1.UnflushedTokens]) -> bool:
        log = live.log
        num_prompt = len(log.prompt_logprobs)
        changes = unflushed_tokens.merge(log, unflushed, live.num_delivered)
        has_more_of_prompt = len(log.prompt_logprobs) > num_prompt
        if has_more_of_prompt:
            self._send(live, prompt_logprobs_to_proto(log, num_prompt))
        for change in changes:
            if change.is_truncated:
                self._journal.truncate(log, change.index)
            self._send(live, tokens_to_proto(log, change.index, change.offset))
        if changes or has_more_of_prompt:
            self._journal.mark_changed(log)
        return bool(changes) or has_more_of_prompt

    # End.

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request at once; its gateways are sent the failure."""
        self._stop(live, Failure.CANCELLED, "cancelled")

    def _gateway_lost(self, live: LiveRequest) -> None:
        """Ends an unnamed request that nobody else can receive. Its client may still wait at the gateway, and has not
        cancelled it: it is told that it may try again.
        """
        self._stop(live, Failure.UNAVAILABLE, "its gateway was away for too long")

    def _stop(self, live: LiveRequest, reason: Failure, message: str) -> None:
        if live.awaits_gateway or live.model is None:  # no gateway receives its events
            self._end(live, reason)
            return
        event = live.model.core.cancel(live.log.key, reason, message)
        assert event is not None
        self.dispatch([event])
        live.model.wake()  # workers free its sequences, and its blocks may admit others

    def truncate(self, live: LiveRequest, index: int, num_tokens: int) -> None:
        """Ends one sequence where its gateway found a stop string."""
        if not unflushed_tokens.truncate(live.log, index, num_tokens):
            return
        self._journal.truncate(live.log, index)
        model = live.model
        if model is not None:
            model.core.finish(live.log.key, index, num_tokens)
            model.wake()
        if unflushed_tokens.is_over(live.log):
            self._end(live)

    def truncate_ended(self, ended: LiveRequest, index: int, num_tokens: int) -> None:
        """The same for a request that ended before the stop match arrived."""
        if unflushed_tokens.truncate(ended.log, index, num_tokens):
            self._journal.truncate(ended.log, index)
            self._keep_ended(ended)

    def acknowledge(self, live: LiveRequest, index: int, num_tokens: int) -> None:
        """Notes how many tokens a gateway has searched for stop strings."""
        if live.model is not None:
            live.model.core.acknowledge(live.log.key, index, num_tokens)
            live.model.wake()

    def _end(self, live: LiveRequest, failure: Failure | None = None) -> None:
        log = live.log
        state = State.FINISHED if failure is None else _STATES.get(failure, State.FAILED)
        self._advance(live, LiveEvent.END)
        self._live.pop(log.key, None)
        if live.trace is not None:
            live.trace.end(state)
            live.trace = None
        log.end(state, time.time(), None if failure is None else reason_to_proto(failure))
        self._journal.mark_changed(log)
        live.awaiting_end = tuple(live.gateways)
        live.remove_gateways(*live.gateways)
        live.forget_request()
        self._keep_ended(live)

    def reject(self, live: LiveRequest, failure: Failure) -> None:
        """A request that may be recorded is refused: its record ends. Does nothing if it has ended."""
        if live.state is LiveState.ENDED:
            return
        if live.model is not None:  # it may have been started
            live.model.core.cancel(live.log.key)
            live.model.wake()
        self._end(live, failure)

    def withdraw(self, log: RequestLog) -> None:
        """A new request is refused because it is not known whether the store has recorded it: if so, it ends there; if
        not, it is not recorded later.
        """
        submit = scheduler_v1.Submit(key=log.key, submission_id=log.submit.submission_id)
        if log.submit.HasField("retention"):
            submit.retention.CopyFrom(log.submit.retention)
        withdrawn = RequestLog(submit, log.accepted_at, record=RecordState.RECORDED)  # without its prompt
        withdrawn.end(State.FAILED, time.time(), reason_to_proto(Failure.STORE_DEGRADED))
        self._journal.mark_changed(withdrawn)
        self._keep_ended(LiveRequest(withdrawn))

    def _keep_ended(self, live: LiveRequest) -> None:
        """Keeps a request that has ended until the store knows its end, or the journal does not keep it any longer."""
        self._drop_ended(live.log.key)
        self._ended[live.log.key] = live
        self.attachments.hold(live.log)
        if not self._journal.awaits(live.log):
            self._drop_ended(live.log.key)
        while self._ended and not self._journal.awaits(oldest := next(iter(self._ended.values())).log):
            self._drop_ended(oldest.key)

    def admit_attachment(self, log: RequestLog) -> AdmissionRefusal | None:
        """Holds a new request's attachment, or returns why there is no room for it."""
        if self.attachments.admit(log) is None:
            return None
        for ended in [each.log for each in self._ended.values()]:
            if not self._journal.awaits(ended):
                self._drop_ended(ended.key)
        return self.attachments.admit(log)

    def _drop_ended(self, key: str) -> None:
        ended = self._ended.pop(key, None)
        if ended is not None:
            self.attachments.release(ended.log)

    # Gateways.

    def attach(self, live: LiveRequest, session: GatewaySession) -> None:
        """Sends a running request's events to a gateway from now on."""
        live.add_gateway(session)
        self._advance(live, LiveEvent.ATTACH)

    def leave(self, live: LiveRequest, session: GatewaySession, *, has_broken: bool) -> None:
        """Sends a gateway no more events: its clients left, or its session broke."""
        if session not in live.gateways:
            return
        live.remove_gateways(session)
        if live.gateways:
            return
        if live.log.submit.detachable:
            self._detach(live)
        elif has_broken:
            self._advance(live, LiveEvent.BREAK)
        else:
            self.cancel(live)

    def _detach(self, live: LiveRequest) -> None:
        self._advance(live, LiveEvent.DETACH)
        if live.model is not None:
            live.model.core.lift_stop_string_lead(live.log.key)  # else it would wait for a gateway, and keep its blocks
            live.model.wake()

    # Events of the core and the journal.

    def dispatch(self, events: Seq[Event]) -> None:
        """Applies events to the logs, and sends them to the gateways."""
        messages: dict[GatewaySession, scheduler_v1.SessionResponse] = {}
        ended: dict[LiveRequest, Failure | None] = {}
        for event in events:
            if isinstance(event, TokensEvent):
                live = self._live[event.sequence.request.key]
                live.append(event)
                self._journal.mark_changed(live.log)
                if event.end is not None and unflushed_tokens.is_over(live.log):
                    ended[live] = None
                if live.trace is not None:
                    live.trace.on_tokens(event.sequence.num_cached_prompt_tokens or 0)
            elif isinstance(event, PromptLogprobsEvent):
                live = self._live[event.request.key]
                live.append_prompt_logprobs(event)
                self._journal.mark_changed(live.log)
            else:
                live = self._live[event.request.key]
                ended[live] = event.reason
            for session in live.gateways:
                message = messages.get(session)
                if message is None:
                    message = messages[session] = message_of(self._journal.epoch)
                fill_event(message.events.add(), event, live.log.fingerprint)
        for live, failure in ended.items():
            self._end(live, failure)
        for session, message in messages.items():
            session.send(message)

    def on_admitted(self, sequence: Sequence) -> None:
        """A sequence of a live request is in a step for the first time, or again. Its prompt is paid."""
        live = self._live[sequence.request.key]
        if live.trace is not None and not sequence.is_one_of_beams:
            live.trace.on_admitted()
        if sequence.charge is not None and sequence.charge.prompt_cost and not live.log.prompt_cost:
            live.log.prompt_cost = sequence.charge.prompt_cost
            self._journal.mark_changed(live.log)
            if not live.log.is_recorded:  # else the store knows, or soon does
                self._send(live, prompt_paid_to_proto(live.log))

    def on_preempted(self, key: str, preemption: PreemptionRecord) -> None:
        """A sequence was preempted."""
        live = self._live.get(key)
        if live is not None and live.trace is not None:
            live.trace.on_preempted(preemption)

    def on_durable(self, log: RequestLog, index: int) -> None:
        """The store has more of a sequence, or its end."""
        live = self._live.get(log.key) or self._ended.get(log.key)
        if live is not None and live.log is log:
            self._durable.add(live, index)

    def _send(self, live: LiveRequest, event: scheduler_v1.Event) -> None:
        for session in live.gateways:
            session.send(message_of(self._journal.epoch, event))
