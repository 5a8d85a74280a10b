"""The span of a request to generate."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway_svc import tracing
from gateway_svc.embeddings import EmbeddingParams
from gateway_svc.output import FinishReason, Usage
from gateway_svc.tracing import GenerationSpan, Operation
from gateway_svc.validated_value import ValidatedValue
from gateway_values import make_generation
from svc_common.errors import Reason
from svc_common.telemetry import context_from

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the finished spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("test"))
    return exporter


def test_a_span_is_of_the_callers_trace_and_leads_on(exporter: InMemorySpanExporter) -> None:
    span = GenerationSpan.of(make_generation(n=2), Operation.CHAT, context_from(PARENT))
    span.first_token(0.25)
    span.end(Usage(5, 7, 3), [FinishReason.STOP, FinishReason.LENGTH], None)
    (ended,) = exporter.get_finished_spans()
    assert ended.name == "chat tiny"
    assert ended.parent is not None
    assert f"{ended.parent.trace_id:032x}-{ended.parent.span_id:016x}" == PARENT[3:-3]
    assert ended.context is not None
    assert span.traceparent == f"00-{PARENT[3:35]}-{ended.context.span_id:016x}-01"
    attributes = dict(ended.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.usage.input_tokens"] == 1
    assert attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert attributes["gen_ai.response.time_to_first_chunk"] == 0.25
    assert ended.status.status_code is StatusCode.UNSET


def test_a_span_of_embeddings_has_the_number_of_prompts_and_dimensions(exporter: InMemorySpanExporter) -> None:
    values = [ValidatedValue("some-id", "tiny", prompt, EmbeddingParams(), 0, None) for prompt in ([5, 6], [7])]
    span = GenerationSpan.of_values(values, Operation.EMBEDDINGS, None)
    span.embedded(384)
    span.end(Usage(3, 0, 1), [], None)
    (ended,) = exporter.get_finished_spans()
    assert ended.name == "embeddings tiny"
    attributes = dict(ended.attributes or {})
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["quire.prompts"] == 2
    assert attributes["gen_ai.embeddings.dimension.count"] == 384


@pytest.mark.parametrize(
    ("reason", "status"), [(Reason.INTERNAL, StatusCode.ERROR), (Reason.CANCELLED, StatusCode.UNSET)]
)
def test_a_failure_is_an_error_unless_it_was_wanted(
    reason: Reason, status: StatusCode, exporter: InMemorySpanExporter
) -> None:
    GenerationSpan.of(make_generation(), Operation.TEXT_COMPLETION, None).end(Usage(), [], reason)
    (ended,) = exporter.get_finished_spans()
    assert ended.status.status_code is status
    assert dict(ended.attributes or {})["error.type"] == reason.value


def test_without_tracing_nothing_is_carried() -> None:
    span = GenerationSpan.of(make_generation(), Operation.CHAT, context_from(PARENT))
    assert span.traceparent == ""
    span.end(Usage(), [], None)


def test_the_model_of_a_request_that_was_there_is_noted_once_it_is_known(exporter: InMemorySpanExporter) -> None:
    span = GenerationSpan(Operation.RESUME.value, "mine", None)
    span.attached("tiny")
    span.end(Usage(), [], None)
    (ended,) = exporter.get_finished_spans()
    assert dict(ended.attributes or {})["gen_ai.response.model"] == "tiny"
