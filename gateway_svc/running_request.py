"""A request while it runs: the scheduler's tokens become text as they arrive, whether or not the client reads."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gateway_svc import request_errors
from gateway_svc.change_signal import ChangeSignal
from gateway_svc.field_paths import FieldPath, contract_field_path
from gateway_svc.metrics import GatewayMetrics, ModelMetrics
from gateway_svc.model_catalog import CatalogModel, ModelCatalog
from gateway_svc.output import Chunk, Usage
from gateway_svc.prompt_output import PromptOutput
from gateway_svc.reader import Acknowledgement, ReaderAction, Release, StopFound
from gateway_svc.rendering import Rendering
from gateway_svc.resume_position import ResumePosition
from gateway_svc.sequence_output import SequenceOutput
from gateway_svc.tenant import Tenant
from gateway_svc.tracing import GenerationSpan
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.vocabulary import Vocabulary
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError, Reason

logger = logging.getLogger("quire.gateway")

_ACKNOWLEDGE_EVERY = 16
_BEGINNING = ResumePosition()


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A client's call for one request. With `submit`, run the request, or join the one that runs under its name.
    Without, continue one that must exist. `resume_positions` are the client's positions in its sequences, by index."""

    key: str
    tenant: Tenant
    request_id: str
    submit: scheduler_pb2.Submit | None = None
    rendering: Rendering | None = None
    resume_positions: Mapping[int, ResumePosition] = field(default_factory=dict)
    chunk_per_token: bool = False
    """Chunks are a function of the tokens alone, however they arrive."""
    field_path: FieldPath = contract_field_path


def log_end(request_id: str, tenant: str, model: str | None, usage: Usage, failure: Reason | None) -> None:
    """Logs the end of a request."""
    if logger.isEnabledFor(logging.DEBUG):
        extra = {
            "request_id": request_id,
            "tenant": tenant,
            "model": model,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "error": failure.value if failure else None,
        }
        logger.debug("request ended", extra=extra)


class _Phase(Enum):
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"


class RunningRequest:
    """One request of a call: a reader of the scheduler's events."""

    def __init__(
        self,
        generate_call: GenerateCall,
        *,
        catalog: ModelCatalog,
        metrics: GatewayMetrics,
        span: GenerationSpan,
        arrival_time: float,
        signal: ChangeSignal,
    ) -> None:
        """`arrival_time` is when the client's call arrived, on the monotonic clock; `signal` is set at each change."""
        self.generate_call = generate_call
        self.failure: QuireError | None = None
        self.is_durable = False
        """Whether the request survives its scheduler, as of its acceptance."""
        self.was_joined = False
        """Whether the request existed before this call."""
        self._catalog = catalog
        self._gateway_metrics = metrics
        self._span = span
        self._arrival_time = arrival_time
        self._signal = signal
        self._phase = _Phase.PENDING
        self._rendering: Rendering | None = None
        self._model: CatalogModel | None = None
        self._model_metrics: ModelMetrics | None = None
        self._prompt_logprobs: list[worker_pb2.TokenLogprobs] = []
        self._sequences: list[SequenceOutput] = []
        self._num_open = 0
        self._has_stops = False
        self._has_tokens = False

    def prepare(self) -> None:
        """Looks up the model, where the call names it. Raises QuireError."""
        if self.generate_call.rendering is not None:
            self._set_rendering(self.generate_call.rendering)

    @property
    def key(self) -> str:
        """The key by which the scheduler knows it."""
        return self.generate_call.key

    @property
    def submit(self) -> scheduler_pb2.Submit | None:
        """What is submitted; None: the request must exist."""
        return self.generate_call.submit

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has accepted it, or it has failed."""
        return self._phase in (_Phase.RUNNING, _Phase.FINISHED)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended or failed."""
        return self._phase is _Phase.FINISHED

    @property
    def rendering(self) -> Rendering:
        """How its tokens become text; set once it is accepted."""
        assert self._rendering is not None, "the caller waits for the acceptance"
        return self._rendering

    @property
    def model_name(self) -> str:
        """The name of its model; set once it is accepted."""
        assert self._model is not None, "the caller waits for the acceptance"
        return self._model.name

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of its model; set once it is accepted."""
        assert self._model is not None, "the caller waits for the acceptance"
        return self._model.tokenizer.vocabulary

    @property
    def usage(self) -> Usage:
        """Tokens processed so far, up to the stop string where one was found."""
        return Usage(
            prompt_tokens=self._rendering.prompt_length if self._rendering else 0,
            completion_tokens=sum(sequence.num_sent_tokens for sequence in self._sequences),
            cached_tokens=self._sequences[0].cached_tokens if self._sequences else 0,
            reasoning_tokens=sum(sequence.num_reasoning_tokens for sequence in self._sequences),
        )

    @property
    def num_logprobs(self) -> int:
        """How many log-probabilities its answer has so far. Each takes about 10 µs to render."""
        return self.rendering.num_logprobs(self.usage.completion_tokens)

    def pop_pending(self) -> list[Chunk]:
        """The output since the previous call, after all that is due of the prompt."""
        if self._rendering is not None and len(self._prompt_logprobs) < self._rendering.num_prompt_logprobs:
            return []
        if len(self._sequences) == 1:  # for each token of a stream
            return self._sequences[0].pop_pending()
        return [chunk for sequence in self._sequences for chunk in sequence.pop_pending()]

    @property
    def prompt(self) -> PromptOutput | None:
        """The prompt, if it is returned, with the text of its tokens. Complete once there is a chunk."""
        return self.prompt_of(None)

    def prompt_of(self, sent_text: str | None) -> PromptOutput | None:
        """The same with the text that the client sent; None: it sent tokens, or not all tokens of its text were
        kept."""
        rendering = self.rendering
        if not rendering.prompt_token_ids:
            return None
        return PromptOutput.of(rendering, self._prompt_logprobs, self.vocabulary, sent_text)

    @property
    def on_disconnect(self) -> OnDisconnect:
        """What becomes of it when its client leaves: it is detached if the client named it, else cancelled."""
        # A request whose rendering is not known yet was started by another call, which may still run.
        return OnDisconnect.DETACH if self._rendering is None else self._rendering.on_disconnect

    def close(self) -> None:
        """Ends the request's metrics and span. A call that ends before its request was cancelled."""
        if self._phase is not _Phase.FINISHED:
            submit = self.generate_call.submit
            goes_on = submit is not None and submit.is_background
            self._end(None if goes_on else Reason.CANCELLED)
        if self._model_metrics is not None:
            self._model_metrics.requests_in_flight.dec()

    # Events of the subscription.

    def field_path(self, which: str, item_index: int | None = None) -> str:
        """A field as the client spells it."""
        return self.generate_call.field_path(which, item_index)

    def on_accepted(self, is_durable: bool) -> None:
        """The scheduler has queued it."""
        self.is_durable = is_durable
        self._metrics.prompt_tokens.inc(self.rendering.prompt_length)
        self._begin()

    def on_attached(self, attached: scheduler_pb2.Attached, *, is_durable: bool) -> Sequence[ReaderAction]:
        """Takes the request's output so far; tokens that are here already are compared, and not taken twice."""
        is_new = self._phase is _Phase.PENDING
        if is_new:
            try:
                self._set_rendering(Rendering.from_proto(attached))
            except QuireError as error:
                return self._give_up(error)
            self.was_joined = True
            self._span.attached(self.model_name)
            self.is_durable = is_durable
            self._has_tokens = True  # the first token was computed for another call
            self._begin()
        if attached.HasField("prompt_logprobs"):
            self.on_prompt_logprobs(attached.prompt_logprobs)
        actions: list[ReaderAction] = []
        num_before = self.usage.completion_tokens
        for tokens in attached.sequences:
            sequence = self._sequences[tokens.index]
            sequence.check(tokens)
            actions += self._extend(sequence, tokens)
        if not is_new:
            self._metrics.tokens.add_tokens(self.usage.completion_tokens - num_before)
        self._end_if_complete()
        if self._has_stops:
            # The scheduler may not have received the latest acknowledgements, and pause without them.
            for sequence in self._sequences:
                actions += self._acknowledge(sequence)
        self._signal.set()
        return actions

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> Sequence[ReaderAction]:
        """Extends a sequence. Stop strings are searched for here, so that a slow client delays nothing."""
        sequence = self._sequences[tokens.index]
        num_before = sequence.num_tokens
        actions = self._extend(sequence, tokens)
        if (num_new := sequence.num_tokens - num_before) and self._phase is _Phase.RUNNING:
            self._measure(sequence, num_new)
        self._end_if_complete()
        if self._has_stops and sequence.num_tokens - sequence.num_acknowledged >= _ACKNOWLEDGE_EVERY:
            actions = [*actions, *self._acknowledge(sequence)]
        self._signal.set()
        return actions

    def on_prompt_logprobs(self, prompt_logprobs: scheduler_pb2.PromptLogprobs) -> None:
        """Adds those that are not here already."""
        num_known = len(self._prompt_logprobs) - (prompt_logprobs.offset - 1)
        if num_known < 0:
            raise ValueError("log-probabilities of the prompt are missing")
        self._prompt_logprobs += prompt_logprobs.tokens[num_known:]
        self._signal.set()

    def on_failed(self, error: QuireError) -> None:
        """Ends the request without all its tokens."""
        if self._phase is not _Phase.FINISHED:
            self.failure = error
            self._end(error.reason)
            self._signal.set()

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.UnflushedTokens]:
        """The tokens of each sequence from its offset on; without an offset, from the beginning."""
        found = (sequence.unflushed(offsets.get(sequence.index, 0)) for sequence in self._sequences)
        unflushed = [one for one in found if one is not None]
        if self._prompt_logprobs:
            if not unflushed or unflushed[0].index:
                offset = self._sequences[0].num_tokens
                unflushed.insert(0, scheduler_pb2.UnflushedTokens(offset=min(offset, offsets.get(0, 0))))
            unflushed[0].prompt_logprobs.extend(self._prompt_logprobs)
        return unflushed

    def _set_rendering(self, rendering: Rendering) -> None:
        """Raises QuireError where this gateway does not have the model or its tokenizer, or the key may not use it."""
        if self._model is None:
            if not self._catalog.is_open_to(self.generate_call.tenant, rendering.model):
                raise request_errors.unknown()
            model = self._catalog.get(rendering.model)
            if model is None or rendering.tokenizer_fingerprint not in (b"", model.tokenizer_fingerprint):
                raise request_errors.model_missing(rendering.model)
            self._model = model
            self._model_metrics = self._gateway_metrics.of_model(model.name)
            self._model_metrics.requests_in_flight.inc()
        self._rendering = rendering

    @property
    def _metrics(self) -> ModelMetrics:
        assert self._model_metrics is not None, "only what has a model is accepted"
        return self._model_metrics

    def _begin(self) -> None:
        rendering = self.rendering
        # With best_of an index is a rank in the answer: what the client has is left out once the sequences are ranked.
        resume_positions = {} if rendering.is_best_of else self.generate_call.resume_positions
        self._sequences = [
            SequenceOutput(
                index,
                self.vocabulary,
                rendering,
                resume_positions.get(index, _BEGINNING),
                chunk_per_token=self.generate_call.chunk_per_token,
            )
            for index in range(rendering.num_sequences)
        ]
        self._num_open = rendering.num_sequences
        self._has_stops = bool(rendering.stops)
        self._phase = _Phase.RUNNING
        self._signal.set()

    def _extend(self, sequence: SequenceOutput, tokens: scheduler_pb2.Tokens) -> Sequence[ReaderAction]:
        if sequence.finish is not None or self._phase is not _Phase.RUNNING:
            return ()
        try:
            sequence.extend(tokens)
        except QuireError as error:
            return self._give_up(error)
        if sequence.finish is None:
            return ()
        actions: list[ReaderAction] = []
        if isinstance(sequence.finish.matched, str):
            actions.append(StopFound(sequence.index, sequence.num_tokens))
        self._num_open -= 1
        if not self._num_open:
            actions.append(Release(None))
        return actions

    def _acknowledge(self, sequence: SequenceOutput) -> Sequence[ReaderAction]:
        if sequence.finish is not None or self._phase is not _Phase.RUNNING:
            return ()
        sequence.num_acknowledged = sequence.num_tokens
        return (Acknowledgement(sequence.index, sequence.num_tokens),)

    def _give_up(self, error: QuireError) -> Sequence[ReaderAction]:
        self.on_failed(error)
        return (Release(self.on_disconnect),)

    def _end_if_complete(self) -> None:
        if not self._num_open and self._phase is _Phase.RUNNING:
            self._end(None)

    def _end(self, failure: Reason | None) -> None:
        self._phase = _Phase.FINISHED
        reasons = [sequence.finish.reason for sequence in self._sequences if sequence.finish is not None]
        usage = self.usage
        self._span.end(usage, reasons, failure)
        call = self.generate_call
        log_end(call.request_id, call.tenant.name, self._model.name if self._model else None, usage, failure)

    def _measure(self, sequence: SequenceOutput, num_tokens: int) -> None:
        now, metrics = time.monotonic(), self._metrics
        metrics.tokens.add_tokens(num_tokens)
        if sequence.last_time is not None:
            metrics.tokens.observe_gap((now - sequence.last_time) / num_tokens)
        elif not self._has_tokens:
            self._has_tokens = True
            metrics.first_token_seconds.observe(now - self._arrival_time)
            self._span.first_token(now - self._arrival_time)
        sequence.last_time = now
