"""The span of a request, with OpenTelemetry's GenAI attributes. It has neither prompts nor outputs."""

from collections.abc import Sequence
from enum import Enum
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from gateway_svc.output import FinishReason, Usage
from gateway_svc.validated_request import ValidatedRequest
from gateway_svc.validated_value import ValidatedValue
from svc_common.errors import Reason
from svc_common.telemetry import traceparent_of, tracer


class Operation(Enum):
    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    RESUME = "resume"
    EMBEDDINGS = "embeddings"
    SCORE = "score"
    CLASSIFY = "classify"


class GenerationSpan:
    """Covers one request from its submission, or from the resume call, to its end; for values, all requests of a call.
    It is never the current span, so
    that no context leaks between the tasks of a stream."""

    def __init__(self, name: str, request_id: str, parent: Context | None) -> None:
        self._span = tracer().start_span(name, context=parent)
        self.traceparent = traceparent_of(self._span)
        """The trace context for the scheduler; empty where the span is not recorded."""
        if self._span.is_recording():
            self._span.set_attributes({"gen_ai.provider.name": "quire", "gen_ai.response.id": request_id})

    @classmethod
    def of(cls, generation: ValidatedRequest, operation: Operation, parent: Context | None) -> Self:
        """The span of a request that this gateway submits."""
        span = cls(f"{operation.value} {generation.model}", generation.request_id, parent)
        if span._span.is_recording():
            span._describe(generation, operation)
        return span

    @classmethod
    def of_values(cls, values: Sequence[ValidatedValue], operation: Operation, parent: Context | None) -> Self:
        """The span of all prompts of a call that this gateway submits for their values; there is at least one."""
        first = values[0]
        span = cls(f"{operation.value} {first.model}", first.request_id, parent)
        if span._span.is_recording():
            span._span.set_attributes(
                {
                    "gen_ai.operation.name": operation.value,
                    "gen_ai.request.model": first.model,
                    "gen_ai.response.model": first.model,
                    "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in values),
                    "quire.prompts": len(values),
                }
            )
        return span

    def _describe(self, generation: ValidatedRequest, operation: Operation) -> None:
        sampling, stopping = generation.sampling, generation.stopping
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation.value,
                "gen_ai.request.model": generation.model,
                "gen_ai.request.max_tokens": stopping.max_tokens,
                "gen_ai.request.temperature": sampling.params["temperature"],
                "gen_ai.request.top_p": sampling.params["top_p"],
                "gen_ai.request.top_k": sampling.params["top_k"],
                "gen_ai.request.frequency_penalty": sampling.params["frequency_penalty"],
                "gen_ai.request.presence_penalty": sampling.params["presence_penalty"],
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.choice.count": generation.n,
                "gen_ai.response.model": generation.model,
                "gen_ai.usage.input_tokens": len(generation.prompt_token_ids),
            }
        )

    def attached(self, model: str) -> None:
        """Sets the model of a request that existed before."""
        self._span.set_attribute("gen_ai.response.model", model)

    def embedded(self, num_dimensions: int) -> None:
        """Sets the number of dimensions of the vectors that the inputs became."""
        self._span.set_attribute("gen_ai.embeddings.dimension.count", num_dimensions)

    def first_token(self, seconds: float) -> None:
        """Sets the time from the call to the first token, in seconds."""
        self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def end(self, usage: Usage, reasons: Sequence[FinishReason], failure: Reason | None) -> None:
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "gen_ai.response.finish_reasons": [reason.value for reason in reasons],
                }
            )
            if failure is not None:
                self._span.set_attribute("error.type", failure.value)
                if failure is not Reason.CANCELLED:  # a cancelled request is not an error
                    self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
