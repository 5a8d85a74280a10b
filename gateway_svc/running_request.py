"""A request while it runs: the scheduler's tokens become text as they come, whether or not the client reads."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc.field_paths import Field, FieldPath, contract_field_path
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.output import Chunk, Usage
from gateway_svc.rendering import Rendering
from gateway_svc.sequence_output import ResumePosition, SequenceOutput
from gateway_svc.session import SchedulerSession
from gateway_svc.subscriptions import Attachment
from gateway_svc.tracing import GenerationSpan
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

logger = logging.getLogger("quire.gateway")

_ACKNOWLEDGE_EVERY = 16
_BEGINNING = ResumePosition()


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What a client asks of a request: with `submit` to run it or, where its name has it running, to join; without, to
    go on with one that must be there. `resume_positions` says by index how far the client has its sequences."""

    key: str
    tenant: str
    request_id: str
    submit: scheduler_pb2.Submit | None = None
    rendering: Rendering | None = None
    resume_positions: Mapping[int, ResumePosition] = field(default_factory=dict)
    field_path: FieldPath = contract_field_path


class _Phase(Enum):
    NEW = "new"
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"


class RunningRequest:
    """One request of a call, as its events leave it."""

    def __init__(
        self,
        generate_call: GenerateCall,
        *,
        session: SchedulerSession,
        vocabulary: Vocabulary,
        metrics: GatewayMetrics,
        span: GenerationSpan,
        arrival_time: float,
        wake: asyncio.Event,
    ) -> None:
        """`arrival_time` is when the client's call came, on the monotonic clock; `wake` is set at each change."""
        self.generate_call = generate_call
        self.failure: QuireError | None = None
        self.is_durable = False
        """Whether the request outlives its scheduler, as known when it was accepted."""
        self._session = session
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._span = span
        self._arrival_time = arrival_time
        self._wake = wake
        self._phase = _Phase.NEW
        self._rendering = generate_call.rendering
        self._attachment: Attachment | None = None
        self._sequences: list[SequenceOutput] = []
        self._num_open = 0
        self._has_stops = False
        self._has_tokens = False

    def start(self, deadline: float | None) -> None:
        """Asks the scheduler for it. Raises QuireError."""
        self._attachment = self._session.subscribe(self.generate_call.key, self.generate_call.submit, self, deadline)
        self._phase = _Phase.PENDING

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has it, or had."""
        return self._phase in (_Phase.RUNNING, _Phase.FINISHED)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes."""
        return self._phase is _Phase.FINISHED

    @property
    def rendering(self) -> Rendering:
        """How its tokens become text; known once it is accepted."""
        assert self._rendering is not None, "the caller waits for the acceptance"
        return self._rendering

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, up to the cut where a stop string was found."""
        return Usage(
            prompt_tokens=self._rendering.prompt_length if self._rendering else 0,
            completion_tokens=sum(sequence.num_tokens for sequence in self._sequences),
            cached_tokens=self._sequences[0].cached_tokens if self._sequences else 0,
        )

    def pop_pending(self) -> list[Chunk]:
        """What came since the call before, one chunk for each sequence that grew."""
        return [chunk for sequence in self._sequences if (chunk := sequence.pop_pending()) is not None]

    def close(self, on_disconnect: OnDisconnect | None = None) -> None:
        """Ends the request's stay here: as `on_disconnect` says, else detached if its client named it, or cancelled."""
        self._release(on_disconnect or self._on_disconnect)
        if self._phase is not _Phase.FINISHED:
            self._end()

    def give_up(self, error: QuireError) -> None:
        """Fails the request for its client, and leaves it."""
        self._release(self._on_disconnect)
        if self._phase is not _Phase.FINISHED:
            self.on_failed(error)

    # Events of the session.

    def field_path(self, which: Field, item_index: int | None = None) -> str:
        """A field as the client spells it."""
        return self.generate_call.field_path(which, item_index)

    def on_accepted(self, is_durable: bool) -> None:
        """It is queued."""
        self.is_durable = is_durable
        self._metrics.prompt_tokens.inc(self.rendering.prompt_length)
        self._begin()

    def on_attached(self, attached: scheduler_pb2.Attached) -> None:
        """It was there, and this is what came of it; what is here already is not taken twice."""
        is_new = self._phase is _Phase.PENDING
        if is_new:
            self._rendering = Rendering.from_proto(attached)
            self.is_durable = not self._session.is_store_degraded
            self._has_tokens = True  # what came first came in another call's time
            self._begin()
        num_before = self.usage.completion_tokens
        for tokens in attached.sequences:
            sequence = self._sequences[tokens.index]
            sequence.check(tokens)
            self._extend(sequence, tokens)
        if not is_new:
            self._metrics.tokens.add_tokens(self.usage.completion_tokens - num_before)
        if self._has_stops and self._phase is _Phase.RUNNING:
            # The scheduler may not have heard how far they were looked for, and wait for that.
            for sequence in self._sequences:
                self._acknowledge(sequence)
        self._wake.set()

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        """A sequence grew. Stop strings are acted on here, so that a slow client holds nothing up."""
        sequence = self._sequences[tokens.index]
        num_before = sequence.num_tokens
        self._extend(sequence, tokens)
        if sequence.num_tokens > num_before:
            self._measure(sequence, sequence.num_tokens - num_before)
        if self._has_stops and sequence.num_tokens - sequence.num_acknowledged >= _ACKNOWLEDGE_EVERY:
            self._acknowledge(sequence)
        self._wake.set()

    def on_failed(self, error: QuireError) -> None:
        """It is over without all its tokens."""
        self.failure = error
        self._end()
        self._wake.set()

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.UnflushedTokens]:
        """What it has of each sequence from an offset on, by index, or else from the beginning."""
        tails = (sequence.unflushed(offsets.get(sequence.index, 0)) for sequence in self._sequences)
        return [unflushed for unflushed in tails if unflushed is not None]

    def _begin(self) -> None:
        rendering = self.rendering
        # Of what is ranked, indices are places in the answer: what a client has of it is left out there.
        resume_positions = {} if rendering.is_best_of else self.generate_call.resume_positions
        self._sequences = [
            SequenceOutput(index, self._vocabulary, rendering, resume_positions.get(index, _BEGINNING))
            for index in range(rendering.num_sequences)
        ]
        self._num_open = rendering.num_sequences
        self._has_stops = bool(rendering.stops)
        self._phase = _Phase.RUNNING
        self._wake.set()

    def _extend(self, sequence: SequenceOutput, tokens: scheduler_pb2.Tokens) -> None:
        if sequence.finish is not None or self._phase is not _Phase.RUNNING:
            return
        try:
            sequence.extend(tokens)
        except QuireError as error:
            self.give_up(error)
            return
        if sequence.finish is None:
            return
        if isinstance(sequence.finish.matched, str):
            self._started_attachment.finish(sequence.index, sequence.num_tokens)
        self._num_open -= 1
        if not self._num_open:
            self._release(None)
            self._end()

    def _acknowledge(self, sequence: SequenceOutput) -> None:
        if sequence.finish is None:
            sequence.num_acknowledged = sequence.num_tokens
            self._started_attachment.acknowledge(sequence.index, sequence.num_tokens)

    @property
    def _on_disconnect(self) -> OnDisconnect:
        # One that is not known yet is another call's as well.
        return OnDisconnect.DETACH if self._rendering is None else self._rendering.on_disconnect

    @property
    def _started_attachment(self) -> Attachment:
        assert self._attachment is not None, "only what was started has tokens"
        return self._attachment

    def _release(self, on_disconnect: OnDisconnect | None) -> None:
        # One that was never started must not touch the request that may have its key.
        if self._attachment is not None:
            self._attachment.release(on_disconnect)

    def _end(self) -> None:
        self._phase = _Phase.FINISHED
        reasons = [sequence.finish.reason for sequence in self._sequences if sequence.finish is not None]
        usage = self.usage
        self._span.end(usage, reasons, self.failure)
        if logger.isEnabledFor(logging.DEBUG):
            extra = {
                "request_id": self.generate_call.request_id,
                "tenant": self.generate_call.tenant,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "error": self.failure.reason.value if self.failure else None,
            }
            logger.debug("request ended", extra=extra)

    def _measure(self, sequence: SequenceOutput, num_tokens: int) -> None:
        now = time.monotonic()
        self._metrics.tokens.add_tokens(num_tokens)
        if not self._has_tokens:
            self._has_tokens = True
            self._metrics.first_token_seconds.observe(now - self._arrival_time)
            self._span.first_token(now - self._arrival_time)
        elif sequence.last_time is not None:
            self._metrics.tokens.observe_gap((now - sequence.last_time) / num_tokens)
        sequence.last_time = now
