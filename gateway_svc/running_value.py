"""A request whose result is a value, while it runs: it waits for the value of its prompt."""

from array import array
from collections.abc import Mapping, Sequence

from gateway_svc import request_errors
from gateway_svc.change_signal import ChangeSignal
from gateway_svc.metrics import ModelMetrics
from gateway_svc.output import Usage
from gateway_svc.reader import ReaderAction, Release
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.validated_value import ValidatedValue
from gateway_svc.value_inputs import Vector
from quire.scheduler.v1 import scheduler_pb2
from svc_common.errors import QuireError


class RunningValue:
    """One prompt of a call: a reader of the scheduler's events."""

    on_disconnect = OnDisconnect.CANCEL
    """Nobody can read the value later: the request has no name."""

    def __init__(
        self, validated: ValidatedValue, submit: scheduler_pb2.Submit, metrics: ModelMetrics, signal: ChangeSignal
    ) -> None:
        """`submit` is what is submitted; `signal` is set at each change."""
        self.failure: QuireError | None = None
        self.value: Vector | None = None
        """A vector, or a score, which is one number; None: not here yet."""
        self.model_fingerprint = b""
        """The version of the model that computed it; empty: unknown."""
        self.submit = submit
        self._validated = validated
        self._metrics = metrics
        self._signal = signal
        self._is_in_flight = False
        self._cached_tokens = 0

    def prepare(self) -> None:
        """Counts it as in flight."""
        self._is_in_flight = True
        self._metrics.requests_in_flight.inc()

    @property
    def key(self) -> str:
        """The key by which the scheduler knows it."""
        return self.submit.key

    @property
    def is_finished(self) -> bool:
        """Whether its value is here, or it has failed."""
        return self.value is not None or self.failure is not None

    @property
    def usage(self) -> Usage:
        """Tokens processed."""
        return Usage(prompt_tokens=len(self._validated.prompt_token_ids), cached_tokens=self._cached_tokens)

    def close(self) -> None:
        """Ends the request's metrics."""
        if self._is_in_flight:
            self._metrics.requests_in_flight.dec()

    # Events of the subscription.

    def field_path(self, which: str, item_index: int | None = None) -> str:
        """A field as the client spells it."""
        return self._validated.field_path(which, item_index)

    def on_accepted(self, is_durable: bool) -> None:
        """The scheduler has queued it."""
        self._metrics.prompt_tokens.inc(len(self._validated.prompt_token_ids))

    def on_attached(self, attached: scheduler_pb2.Attached, *, is_durable: bool) -> Sequence[ReaderAction]:
        """A new scheduler runs the request, or its value is on record."""
        return [action for tokens in attached.sequences for action in self.on_tokens(tokens)]

    def on_tokens(self, tokens: scheduler_pb2.Tokens) -> Sequence[ReaderAction]:
        """Takes the value, which is the end of the only sequence."""
        if self.is_finished:
            return ()
        if tokens.HasField("cached_tokens"):
            self._cached_tokens = tokens.cached_tokens
        if not tokens.HasField("end"):
            return ()
        if not tokens.end.value.numbers:
            self.on_failed(request_errors.internal("the result is not a value"))
            return (Release(OnDisconnect.CANCEL),)
        numbers = array("f", tokens.end.value.numbers)
        params = self._validated.params
        if (error := params.check(numbers, self.field_path)) is not None:
            self.on_failed(error)
        else:
            self.value, self.model_fingerprint = numbers, tokens.model_fingerprint
            self._signal.set()
        return (Release(None),)

    def on_prompt_logprobs(self, prompt_logprobs: scheduler_pb2.PromptLogprobs) -> None:
        """They are not requested."""

    def on_failed(self, error: QuireError) -> None:
        """Ends the request without its value."""
        if not self.is_finished:
            self.failure = error
            self._signal.set()

    def unflushed(self, offsets: Mapping[int, int]) -> list[scheduler_pb2.UnflushedTokens]:
        """None: there are no tokens."""
        return []
