"""One span for each traced sequence's stay at the worker, in its request's own trace."""

from dataclasses import dataclass

from opentelemetry.trace import Span, Status, StatusCode

from svc_common.telemetry import context_from, tracer
from worker_svc.step import Step, StepOutcome


@dataclass(slots=True)
class _Stay:
    span: Span
    num_computed: int = 0
    num_drawn: int = 0

    def end(self) -> None:
        self.span.set_attribute("quire.tokens.computed", self.num_computed)
        self.span.set_attribute("quire.tokens.drawn", self.num_drawn)
        self.span.end()


class SequenceSpans:
    """The open spans of one step stream."""

    def __init__(self) -> None:
        self._stays: dict[int, _Stay] = {}

    def begin_step(self, step: Step) -> None:
        """A step came: spans of sequences that finished end, those of new ones begin."""
        for sequence_id in step.finished_ids:
            stay = self._stays.pop(sequence_id, None)
            if stay is not None:
                stay.end()
        for new in step.new_sequences:
            context = context_from(new.traceparent) if new.traceparent else None
            if context is None or new.sequence_id in self._stays:
                continue
            span = tracer().start_span("worker", context=context)
            if span.is_recording():
                span.set_attribute("quire.sequence.index", new.index)
                self._stays[new.sequence_id] = _Stay(span)

    def end_step(self, step: Step, outcome: StepOutcome) -> None:
        """A step is done: count its tokens."""
        if not self._stays:
            return
        for scheduled, result in zip(step.scheduled, outcome.sequences, strict=True):
            stay = self._stays.get(scheduled.sequence_id)
            if stay is None:
                continue
            if result.failure is not None:
                stay.span.set_status(Status(StatusCode.ERROR))
                continue
            stay.num_computed += scheduled.num_tokens
            stay.num_drawn += len(result.token_ids)

    def close(self) -> None:
        """The stream ended, and with it every stay."""
        for stay in self._stays.values():
            stay.end()
        self._stays.clear()
