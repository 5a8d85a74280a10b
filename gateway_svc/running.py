"""Requests while they run: the scheduler's tokens become text as they come, whether or not the client reads."""

import asyncio
import logging
import time
from collections.abc import Sequence
from enum import Enum
from typing import Self

from gateway_svc.detokenizer import SequenceText
from gateway_svc.fields import Field
from gateway_svc.generation import Generation, OnLeave
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob, Usage
from gateway_svc.session import SchedulerSession
from gateway_svc.tracing import GenerationSpan
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError

logger = logging.getLogger("quire.gateway")

_ACKNOWLEDGE_EVERY = 16


class ClientLeft(Exception):  # noqa: N818
    """Nobody is left to take an answer."""


class _Sequence:
    """One sequence of a request: what it has, and what of that was not taken yet."""

    def __init__(self, index: int, vocabulary: Vocabulary, generation: Generation) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_acknowledged = 0
        self.cached_tokens = 0
        self.last_time: float | None = None
        self.finish: Finish | None = None
        self._text = SequenceText(vocabulary, generation)
        self._pending: Chunk | None = None

    def extend(self, tokens: scheduler_pb2.Tokens) -> None:
        """Takes tokens in, less those that are here already. Raises ValueError where some are missing."""
        num_known = self.num_tokens - tokens.offset
        if num_known < 0:
            raise ValueError("tokens are missing")
        if tokens.HasField("cached_tokens"):
            self.cached_tokens = tokens.cached_tokens
        cause = tokens.end.WhichOneof("cause") if tokens.HasField("end") else None
        token_ids, logprobs = tokens.token_ids, tokens.logprobs
        last = len(token_ids) - 1
        chunk = self._pending or Chunk(self.index, self.num_tokens)
        self._pending = chunk
        for place in range(num_known, last + 1):
            token_id = token_ids[place]
            chunk.token_ids.append(token_id)
            self.num_tokens += 1
            if logprobs:
                chunk.logprobs.append(TokenLogprob.from_proto(token_id, logprobs[place], self._text.num_chars))
            if cause == "stop_token_id" and place == last:
                break  # the token that ends a sequence is counted and not read
            chunk.text += self._text.push(token_id)
            if self._text.matched is not None:
                self.finish = chunk.finish = Finish(FinishReason.STOP, self._text.matched)
                return
        if cause is not None:
            chunk.text += self._text.flush()
            if cause == "stop_token_id":
                chunk.finish = Finish(FinishReason.STOP, tokens.end.stop_token_id)
            else:
                chunk.finish = Finish(FinishReason.LENGTH)
            self.finish = chunk.finish
            if tokens.HasField("score"):
                chunk.score = tokens.score

    def take(self) -> Chunk | None:
        """What came since the call before."""
        chunk, self._pending = self._pending, None
        return chunk


class _Phase(Enum):
    NEW = "new"
    SUBMITTED = "submitted"
    RUNNING = "running"
    OVER = "over"


class RunningRequest:
    """One request of a group, as its events leave it."""

    def __init__(
        self,
        generation: Generation,
        submit: scheduler_pb2.Submit,
        *,
        session: SchedulerSession,
        vocabulary: Vocabulary,
        metrics: GatewayMetrics,
        span: GenerationSpan,
        called_at: float,
        wake: asyncio.Event,
    ) -> None:
        """`called_at` is when the client's call came, on the monotonic clock; `wake` is set at each change."""
        self.generation = generation
        self.failure: QuireError | None = None
        self._key = submit.key
        self._submit = submit
        self._session = session
        self._metrics = metrics
        self._span = span
        self._called_at = called_at
        self._wake = wake
        self._phase = _Phase.NEW
        self._sequences = [_Sequence(index, vocabulary, generation) for index in range(generation.best_of)]
        self._num_open = generation.best_of
        self._has_tokens = False

    def start(self, deadline: float | None) -> None:
        """Asks the scheduler to run it. Raises QuireError."""
        self._session.submit(self._submit, self, deadline)
        self._phase = _Phase.SUBMITTED

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has it, or had."""
        return self._phase in (_Phase.RUNNING, _Phase.OVER)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._phase is _Phase.OVER

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, up to the cut where a stop string was found."""
        return Usage(
            prompt_tokens=len(self.generation.prompt_token_ids),
            completion_tokens=sum(sequence.num_tokens for sequence in self._sequences),
            cached_tokens=self._sequences[0].cached_tokens,
        )

    def take(self) -> list[Chunk]:
        """What came since the call before, one chunk for each sequence that grew."""
        return [chunk for sequence in self._sequences if (chunk := sequence.take()) is not None]

    def leave(self, on_leave: OnLeave | None = None) -> None:
        """Ends the request's stay here: as `on_leave` says, else detached if its client named it, or cancelled."""
        self._release(on_leave or self.generation.on_leave)
        if self._phase is not _Phase.OVER:
            self._end()

    def give_up(self, error: QuireError) -> None:
        """Fails the request for its client, and leaves it."""
        self._release(self.generation.on_leave)
        if self._phase is not _Phase.OVER:
            self.on_failed(error)

    # Events of the session.

    def spell(self, which: Field) -> str:
        """A field as the client spells it."""
        return self.generation.spell(which)

    def on_accepted(self) -> None:
        """It is queued."""
        self._phase = _Phase.RUNNING
        self._metrics.prompt_tokens.inc(len(self.generation.prompt_token_ids))
        self._wake.set()

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        """A sequence grew. Stop strings are acted on here, so that a slow client holds nothing up."""
        sequence = self._sequences[tokens.index]
        if sequence.finish is not None:
            return
        num_before = sequence.num_tokens
        sequence.extend(tokens)
        self._measure(sequence, sequence.num_tokens - num_before)
        if sequence.finish is not None:
            if isinstance(sequence.finish.matched, str):
                self._session.finish(self._key, sequence.index, sequence.num_tokens)
            self._num_open -= 1
            if not self._num_open:
                self._session.release(self._key, None)
                self._end()
        elif self.generation.stopping.stops and sequence.num_tokens - sequence.num_acknowledged >= _ACKNOWLEDGE_EVERY:
            sequence.num_acknowledged = sequence.num_tokens
            self._session.acknowledge(self._key, sequence.index, sequence.num_tokens)
        self._wake.set()

    def on_failed(self, error: QuireError) -> None:
        """It is over without all its tokens."""
        self.failure = error
        self._end()
        self._wake.set()

    def _release(self, on_leave: OnLeave) -> None:
        # One that was never submitted must not touch the request that may have its key.
        if self._phase in (_Phase.SUBMITTED, _Phase.RUNNING):
            self._session.release(self._key, on_leave)

    def _end(self) -> None:
        self._phase = _Phase.OVER
        reasons = [sequence.finish.reason for sequence in self._sequences if sequence.finish is not None]
        usage = self.usage
        self._span.end(usage, reasons, self.failure)
        if logger.isEnabledFor(logging.DEBUG):
            extra = {
                "request_id": self.generation.request_id,
                "tenant": self._submit.tenant,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "error": self.failure.reason.value if self.failure else None,
            }
            logger.debug("request ended", extra=extra)

    def _measure(self, sequence: _Sequence, num_tokens: int) -> None:
        now = time.monotonic()
        self._metrics.tokens.came(num_tokens)
        if not self._has_tokens:
            self._has_tokens = True
            self._metrics.first_token_seconds.observe(now - self._called_at)
            self._span.first_token(now - self._called_at)
        elif sequence.last_time is not None:
            self._metrics.tokens.waited((now - sequence.last_time) / max(num_tokens, 1))
        sequence.last_time = now


class RequestGroup:
    """The requests of one call, one for each of its prompts. Leaving the block leaves what still runs."""

    def __init__(self, requests: Sequence[RunningRequest], wake: asyncio.Event) -> None:
        self.requests = requests
        self._wake = wake
        self._client_left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Once one has failed the call is answered with that: nobody will come back for the others.
        failed = any(request.failure is not None for request in self.requests)
        for request in self.requests:
            request.leave(OnLeave.CANCEL if failed else None)

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, over all requests."""
        return sum((request.usage for request in self.requests), Usage())

    def client_left(self) -> None:
        """Notes that nobody waits any more: whoever does is told with ClientLeft."""
        self._client_left = True
        self._wake.set()

    async def accepted(self) -> None:
        """Waits until every request is accepted. Raises the QuireError of one that is not, or ClientLeft."""
        while not all(request.is_accepted for request in self.requests):
            await self._change()
        for request in self.requests:
            if request.failure is not None:
                raise request.failure

    async def next(self) -> list[tuple[int, Chunk]]:
        """Waits for the next chunks, each with the place of its request; none at the end.

        Raises, after all that came before, the QuireError of a request that failed, or ClientLeft. May be
        cancelled and called again without loss.
        """
        while True:
            chunks = [(place, chunk) for place, request in enumerate(self.requests) for chunk in request.take()]
            if chunks:
                return chunks
            for request in self.requests:
                if request.failure is not None:
                    raise request.failure
            if all(request.is_over for request in self.requests):
                return []
            await self._change()

    async def _change(self) -> None:
        self._wake.clear()
        if not self._client_left:
            await self._wake.wait()
        if self._client_left:
            raise ClientLeft
