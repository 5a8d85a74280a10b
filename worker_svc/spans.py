"""One span for the time that a traced sequence is at the worker, in its request's trace."""

from dataclasses import dataclass

from opentelemetry.trace import Span, Status, StatusCode

from svc_common.telemetry import context_from, tracer
from worker_svc.step import Step, StepOutcome


@dataclass(slots=True)
class _SequenceSpan:
    span: Span
    num_computed: int = 0
    num_sampled: int = 0

    def end(self) -> None:
        self.span.set_attribute("quire.tokens.computed", self.num_computed)
        self.span.set_attribute("quire.tokens.sampled", self.num_sampled)
        self.span.end()


class SequenceSpans:
    """The open spans of one step stream."""

    def __init__(self) -> None:
        self._spans: dict[int, _SequenceSpan] = {}

    def begin_step(self, step: Step) -> None:
        """Ends the spans of finished sequences and begins those of new ones."""
        for sequence_id in step.finished_ids:
            sequence_span = self._spans.pop(sequence_id, None)
            if sequence_span is not None:
                sequence_span.end()
        for new in step.new_sequences:
            context = context_from(new.traceparent) if new.traceparent else None
            if context is None or new.sequence_id in self._spans:
                continue
            span = tracer().start_span("worker", context=context)
            if span.is_recording():
                span.set_attribute("quire.sequence.index", new.index)
                self._spans[new.sequence_id] = _SequenceSpan(span)

    def end_step(self, step: Step, outcome: StepOutcome) -> None:
        """Counts a step's tokens, and ends the spans of sequences with values."""
        if not self._spans:
            return
        for scheduled, result in zip(step.scheduled, outcome.sequences, strict=True):
            sequence_span = self._spans.get(scheduled.sequence_id)
            if sequence_span is None:
                continue
            if result.failure is not None:
                sequence_span.span.set_status(Status(StatusCode.ERROR))
                continue
            sequence_span.num_computed += scheduled.num_tokens
            sequence_span.num_sampled += len(result.token_ids)
            if result.value:
                del self._spans[scheduled.sequence_id]
                sequence_span.end()

    def close(self) -> None:
        """Ends all spans: the stream has ended."""
        for sequence_span in self._spans.values():
            sequence_span.end()
        self._spans.clear()
