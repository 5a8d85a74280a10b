"""A request of this term: its log, its state, and the gateways that receive its events."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import cast

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.events import PromptLogprobsEvent, TokensEvent
from scheduler_svc.core.request import Request, RestoredSequence
from scheduler_svc.gateway_session import GatewaySession
from scheduler_svc.live_state import LiveEvent, LiveState, next_state
from scheduler_svc.model_versions import ModelVersion
from scheduler_svc.request_log import RequestLog, SequenceLog
from scheduler_svc.session_wire import end_to_proto, logprobs_to_proto, request_from_log
from scheduler_svc.tracing import RequestTrace

_DURABLE_STRIDE = 32  # tokens of a sequence that become durable before its gateways are sent the count

_NOT_STARTED = (LiveState.NEW, LiveState.TAKEN_OVER, LiveState.UNCLAIMED)


class LiveRequest:
    """A request, from its submission or takeover until it has ended."""

    __slots__ = (
        "_num_delivered",
        "_num_sent_durable",
        "_request",
        "_timer",
        "accepted_at",
        "awaiting_end",
        "gateways",
        "log",
        "model",
        "state",
        "trace",
    )

    def __init__(self, log: RequestLog) -> None:
        self.log = log
        self.state = LiveState.ENDED if log.is_over else LiveState.NEW
        self.accepted_at: float | None = None
        """When this scheduler accepted it as new, on the monotonic clock; None: an earlier one did."""
        self.model: ModelVersion | None = None  # that it runs on, or waits for
        self.gateways: list[GatewaySession] = []
        self.awaiting_end: tuple[GatewaySession, ...] = ()
        """Gateways that had its events when it ended: they keep its last tokens until these are durable."""
        self.trace: RequestTrace | None = None
        self._request: Request | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_delivered = [0] * len(log.sequences)
        self._num_sent_durable = [0] * len(log.sequences)

    @property
    def is_running(self) -> bool:
        """Whether the core has it."""
        return self.state not in _NOT_STARTED and self.state is not LiveState.ENDED

    @property
    def awaits_gateway(self) -> bool:
        """Whether it was taken over, and waits for a gateway."""
        return self.state is LiveState.TAKEN_OVER or self.state is LiveState.UNCLAIMED

    @property
    def runs_in_background(self) -> bool:
        """Whether it runs without a gateway, for as long as it takes."""
        return self.state is LiveState.DETACHED and self.log.submit.is_background

    def advance(self, event: LiveEvent) -> bool:
        """Changes the state. A timer of the state before is stopped. Whether the state is another one now."""
        before, self.state = self.state, next_state(self.state, event)
        if self.state is not before and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self.state is not before

    def start_timer(self, seconds: float, callback: Callable[["LiveRequest"], None]) -> None:
        """Calls `callback` after `seconds` unless the state changes before."""
        self._timer = asyncio.get_running_loop().call_later(seconds, callback, self)

    # The core's values.

    def request_at(self, now: float) -> Request:
        """The request for the core. It is converted once; `now` is the monotonic clock, in seconds."""
        if self._request is None:
            self._request = request_from_log(self.log, now)
        return self._request

    def forget_request(self) -> None:
        """The core does not have it any more."""
        self._request = None

    def restored(self) -> list[RestoredSequence]:
        """The sequences as far as they are known."""
        log = self.log
        is_paid = log.prompt_cost > 0
        if log.submit.HasField("beam_search"):
            return [RestoredSequence([], ended=False, is_prompt_paid=is_paid)]  # a search starts from its prompt
        num_prompt = len(log.prompt_logprobs)
        return [
            RestoredSequence(list(sequence.token_ids), sequence.end is not None, num_prompt, is_paid)
            for sequence in log.sequences
        ]

    def append(self, event: TokensEvent) -> None:
        """Adds a step's tokens to the log."""
        log, index = self.log, event.sequence.index
        if index == len(log.sequences):
            log.sequences.append(SequenceLog(score=event.score))  # of a search that has ended
        sequence = log.sequences[index]
        if not sequence.token_ids:
            sequence.cached_tokens = event.sequence.num_cached_prompt_tokens or 0
            self._set_fingerprint()
        sequence.token_ids += event.token_ids
        if event.logprobs:
            sequence.logprobs += logprobs_to_proto(event.logprobs)
        if event.end is not None:
            sequence.end = end_to_proto(event.end)

    def append_prompt_logprobs(self, event: PromptLogprobsEvent) -> None:
        """Adds log-probabilities of the prompt to the log."""
        self._set_fingerprint()
        self.log.prompt_logprobs += cast("Seq[worker_v1.TokenLogprobs]", event.logprobs)

    def _set_fingerprint(self) -> None:
        if self.model is not None:
            self.log.fingerprint = self.model.fingerprint

    # Gateways.

    @property
    def num_delivered(self) -> list[int]:
        """How many tokens of each sequence gateways received in this term: while there is a gateway, all of them."""
        if self.gateways:
            self._num_delivered = [len(sequence.token_ids) for sequence in self.log.sequences]
        return self._num_delivered

    def add_gateway(self, session: GatewaySession) -> None:
        """Sends it the request's events from now on."""
        if session not in self.gateways:
            self.gateways.append(session)

    def remove_gateways(self, *sessions: GatewaySession) -> None:
        """Sends them no more events."""
        self._num_delivered = self.num_delivered
        for session in sessions:
            self.gateways.remove(session)

    def durable_update(self, index: int) -> scheduler_v1.Event | None:
        """The event that more tokens of a sequence are durable; None where it is not worth a message yet."""
        if index >= len(self._num_sent_durable):
            return None  # of a search, whose results are its end
        sequence = self.log.sequences[index]
        if sequence.end is not None and not sequence.is_end_durable:
            return None  # or all of its tokens would seem to be the end
        if sequence.num_durable - self._num_sent_durable[index] < _DURABLE_STRIDE and not sequence.is_end_durable:
            return None
        self._num_sent_durable[index] = sequence.num_durable
        durable = scheduler_v1.Durable(index=index, num_tokens=sequence.num_durable)
        return scheduler_v1.Event(key=self.log.key, durable=durable)
