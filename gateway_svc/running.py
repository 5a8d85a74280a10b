"""A request while it runs: the scheduler's tokens become text as they come, whether or not the client reads."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc.fields import Field, Spelling, as_in_contract
from gateway_svc.generation import OnLeave
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.output import Chunk, Usage
from gateway_svc.rendering import Rendering
from gateway_svc.routes import Attachment
from gateway_svc.sequence_output import SequenceOutput, Start
from gateway_svc.session import SchedulerSession
from gateway_svc.tracing import GenerationSpan
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

logger = logging.getLogger("quire.gateway")

_ACKNOWLEDGE_EVERY = 16
_BEGINNING = Start()


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks of a request: with `submit` to run it or, where its name has it running, to join; without, to
    go on with one that must be there. `starts` says by index how far the client has its sequences."""

    key: str
    tenant: str
    request_id: str
    submit: scheduler_pb2.Submit | None = None
    rendering: Rendering | None = None
    starts: Mapping[int, Start] = field(default_factory=dict)
    spell: Spelling = as_in_contract


class _Phase(Enum):
    NEW = "new"
    ASKING = "asking"
    RUNNING = "running"
    OVER = "over"


class RunningRequest:
    """One request of a call, as its events leave it."""

    def __init__(
        self,
        ask: Ask,
        *,
        session: SchedulerSession,
        vocabulary: Vocabulary,
        metrics: GatewayMetrics,
        span: GenerationSpan,
        called_at: float,
        wake: asyncio.Event,
    ) -> None:
        """`called_at` is when the client's call came, on the monotonic clock; `wake` is set at each change."""
        self.ask = ask
        self.failure: QuireError | None = None
        self.is_durable = False
        """Whether the request outlives its scheduler, as known when it was accepted."""
        self._session = session
        self._vocabulary = vocabulary
        self._metrics = metrics
        self._span = span
        self._called_at = called_at
        self._wake = wake
        self._phase = _Phase.NEW
        self._rendering = ask.rendering
        self._attachment: Attachment | None = None
        self._sequences: list[SequenceOutput] = []
        self._num_open = 0
        self._has_stops = False
        self._has_tokens = False

    def start(self, deadline: float | None) -> None:
        """Asks the scheduler for it. Raises QuireError."""
        self._attachment = self._session.ask(self.ask.key, self.ask.submit, self, deadline)
        self._phase = _Phase.ASKING

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has it, or had."""
        return self._phase in (_Phase.RUNNING, _Phase.OVER)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._phase is _Phase.OVER

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

    def take(self) -> list[Chunk]:
        """What came since the call before, one chunk for each sequence that grew."""
        return [chunk for sequence in self._sequences if (chunk := sequence.take()) is not None]

    def leave(self, on_leave: OnLeave | None = None) -> None:
        """Ends the request's stay here: as `on_leave` says, else detached if its client named it, or cancelled."""
        self._release(on_leave or self._on_leave)
        if self._phase is not _Phase.OVER:
            self._end()

    def give_up(self, error: QuireError) -> None:
        """Fails the request for its client, and leaves it."""
        self._release(self._on_leave)
        if self._phase is not _Phase.OVER:
            self.on_failed(error)

    # Events of the session.

    def spell(self, which: Field, place: int | None = None) -> str:
        """A field as the client spells it."""
        return self.ask.spell(which, place)

    def on_accepted(self, is_durable: bool) -> None:
        """It is queued."""
        self.is_durable = is_durable
        self._metrics.prompt_tokens.inc(self.rendering.prompt_length)
        self._begin()

    def on_attached(self, attached: scheduler_pb2.Attached) -> None:
        """It was there, and this is what came of it; what is here already is not taken twice."""
        is_new = self._phase is _Phase.ASKING
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
            self._metrics.tokens.came(self.usage.completion_tokens - num_before)
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

    def tails(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.Tail]:
        """What it has of each sequence from an offset on, by index, or else from the beginning."""
        tails = (sequence.tail(offsets.get(sequence.index, 0)) for sequence in self._sequences)
        return [tail for tail in tails if tail is not None]

    def _begin(self) -> None:
        rendering = self.rendering
        # Of what is ranked, indices are places in the answer: what a client has of it is left out there.
        starts = {} if rendering.is_ranked_here else self.ask.starts
        self._sequences = [
            SequenceOutput(index, self._vocabulary, rendering, starts.get(index, _BEGINNING))
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
            self._held.finish(sequence.index, sequence.num_tokens)
        self._num_open -= 1
        if not self._num_open:
            self._release(None)
            self._end()

    def _acknowledge(self, sequence: SequenceOutput) -> None:
        if sequence.finish is None:
            sequence.num_acknowledged = sequence.num_tokens
            self._held.acknowledge(sequence.index, sequence.num_tokens)

    @property
    def _on_leave(self) -> OnLeave:
        # One that is not known yet is another call's as well.
        return OnLeave.DETACH if self._rendering is None else self._rendering.on_leave

    @property
    def _held(self) -> Attachment:
        assert self._attachment is not None, "only what was started has tokens"
        return self._attachment

    def _release(self, on_leave: OnLeave | None) -> None:
        # One that was never started must not touch the request that may have its key.
        if self._attachment is not None:
            self._attachment.release(on_leave)

    def _end(self) -> None:
        self._phase = _Phase.OVER
        reasons = [sequence.finish.reason for sequence in self._sequences if sequence.finish is not None]
        usage = self.usage
        self._span.end(usage, reasons, self.failure)
        if logger.isEnabledFor(logging.DEBUG):
            extra = {
                "request_id": self.ask.request_id,
                "tenant": self.ask.tenant,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "error": self.failure.reason.value if self.failure else None,
            }
            logger.debug("request ended", extra=extra)

    def _measure(self, sequence: SequenceOutput, num_tokens: int) -> None:
        now = time.monotonic()
        self._metrics.tokens.came(num_tokens)
        if not self._has_tokens:
            self._has_tokens = True
            self._metrics.first_token_seconds.observe(now - self._called_at)
            self._span.first_token(now - self._called_at)
        elif sequence.last_time is not None:
            self._metrics.tokens.waited((now - sequence.last_time) / num_tokens)
        sequence.last_time = now
