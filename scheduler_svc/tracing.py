"""Spans of a request's time in the scheduler, in the request's own trace: queued, prefill, decode."""

import math

from opentelemetry.trace import Span

from scheduler_svc.core.request import PreemptionRecord
from svc_common.telemetry import context_from, tracer


class RequestTrace:
    """The spans of one request, one after the other. Sequences of one request share them."""

    def __init__(self, traceparent: str, num_prompt_tokens: int, num_sequences: int) -> None:
        self._context = context_from(traceparent)
        self._attributes = {"quire.prompt_tokens": num_prompt_tokens, "quire.sequences": num_sequences}
        self._stage = "queued"
        self._span = self._start()

    @classmethod
    def of(cls, traceparent: str, num_prompt_tokens: int, num_sequences: int) -> "RequestTrace | None":
        """Spans for a request that is traced, else None."""
        trace = cls(traceparent, num_prompt_tokens, num_sequences) if traceparent else None
        return trace if trace is not None and trace._span.is_recording() else None

    def on_admitted(self) -> None:
        """A sequence runs. It may have run before, and been preempted, or be one of several."""
        if self._stage == "queued":
            self._next("prefill")
        else:
            self._span.add_event("admitted")

    def on_tokens(self, cached_tokens: int) -> None:
        if self._stage == "prefill":
            self._span.set_attribute("quire.cached_tokens", cached_tokens)
            self._next("decode")

    def on_preempted(self, preemption: PreemptionRecord) -> None:
        """A sequence was preempted, with the estimated seconds of each choice."""
        attributes: dict[str, str | float] = {
            "quire.choice": preemption.method.name.lower(),
            "quire.recompute_seconds": preemption.recompute_seconds,
        }
        if math.isfinite(preemption.swap_seconds):
            attributes["quire.swap_seconds"] = preemption.swap_seconds
        self._span.add_event("preempted", attributes)

    def end(self, state: str) -> None:
        self._span.set_attribute("quire.state", state)
        self._span.end()

    def _next(self, stage: str) -> None:
        self._span.end()
        self._stage = stage
        self._span = self._start()

    def _start(self) -> Span:
        return tracer().start_span(f"scheduler.{self._stage}", self._context, attributes=self._attributes)
