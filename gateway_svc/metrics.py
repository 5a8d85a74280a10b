"""The gateway's Prometheus metrics. No label holds a value that a client chose."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway_svc.refusals import Protocol, Refusal

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


@dataclass(slots=True)
class CallOutcome:
    """How a call ended: a gRPC status name or an HTTP status. `model` is the name of its model, empty where
    that is not served."""

    code: str
    model: str = ""


class TokenMetrics:
    """Tokens that a model generated, and the time between tokens of a sequence.

    Observed for every token on the one thread that there is, so without the lock and the search over buckets of
    prometheus_client's histogram.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_gaps = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._gap_seconds = 0.0

    def add_tokens(self, num_tokens: int) -> None:
        """Counts tokens."""
        self._num_tokens += num_tokens

    def observe_gap(self, seconds: float) -> None:
        """Observes the time between two tokens, in seconds."""
        self._num_gaps[bisect_left(_TOKEN_BUCKETS, seconds)] += 1
        self._gap_seconds += seconds

    def add_to(self, model: str, tokens: CounterMetricFamily, gaps: HistogramMetricFamily) -> None:
        """Adds the samples of a model to a scrape."""
        tokens.add_metric([model], self._num_tokens)
        bounds = map(floatToGoString, (*_TOKEN_BUCKETS, float("inf")))
        buckets = list(zip(bounds, accumulate(self._num_gaps), strict=True))
        gaps.add_metric([model], buckets=buckets, sum_value=self._gap_seconds)


class _TokenCollector(Collector):
    """The token metrics of all models, for a scrape."""

    def __init__(self, models: Mapping[str, TokenMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("quire_gateway_generation_tokens", "Tokens generated", labels=["model"])
        gaps = HistogramMetricFamily(
            "quire_gateway_inter_token_latency_seconds", "Time between tokens of a sequence", labels=["model"]
        )
        for name, metrics in self._models.items():
            metrics.add_to(name, tokens, gaps)
        yield from (tokens, gaps)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """Metrics of the requests for one model."""

    requests_in_flight: Gauge
    first_token_seconds: Histogram
    prompt_tokens: Counter
    tokens: TokenMetrics


class GatewayMetrics:
    """One gateway's metrics, in a registry of its own."""

    def __init__(self, models: Sequence[str]) -> None:
        """`models` are the names of all models that this gateway serves: no other name becomes a label."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "quire_gateway_requests", "Calls answered", ["protocol", "method", "code", "model"], registry=self.registry
        )
        self._request_seconds = Histogram(
            "quire_gateway_request_seconds",
            "Time from a call to the end of its answer",
            ["protocol", "method", "model"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self.failed_logins = Counter(
            "quire_gateway_failed_logins",
            "Calls without a valid credential",
            ["protocol", "reason"],
            registry=self.registry,
        )
        self._refusals = Counter(
            "quire_gateway_refusals",
            "Calls and connections refused before a request of theirs was submitted",
            ["protocol", "reason"],
            registry=self.registry,
        )
        self.ignored_fields = Counter(
            "quire_gateway_ignored_fields",
            "Fields of HTTP bodies that no API defines",
            ["method"],
            registry=self.registry,
        )
        requests_in_flight = Gauge(
            "quire_gateway_requests_in_flight",
            "Requests that run now",
            ["model"],
            registry=self.registry,
        )
        first_token_seconds = Histogram(
            "quire_gateway_time_to_first_token_seconds",
            "Time from a call to the first token of each of its requests",
            ["model"],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        prompt_tokens = Counter(
            "quire_gateway_prompt_tokens", "Prompt tokens of accepted requests", ["model"], registry=self.registry
        )
        self._models = {
            name: ModelMetrics(
                requests_in_flight.labels(name),
                first_token_seconds.labels(name),
                prompt_tokens.labels(name),
                TokenMetrics(),
            )
            for name in models
        }
        self.registry.register(_TokenCollector({name: model.tokens for name, model in self._models.items()}))

    def of_model(self, name: str) -> ModelMetrics:
        """The metrics of a model that this gateway serves."""
        return self._models[name]

    def refuse(self, protocol: Protocol, refusal: Refusal) -> None:
        """Counts a call or a connection that was refused before a request of it was submitted."""
        self._refusals.labels(protocol, refusal.value).inc()

    @contextmanager
    def call(self, protocol: Protocol, method: str, code: str) -> Iterator[CallOutcome]:
        """Counts and times one call. Its code is `code` unless the block sets another."""
        started = time.monotonic()
        outcome = CallOutcome(code)
        try:
            yield outcome
        finally:
            self._requests.labels(protocol, method, outcome.code, outcome.model).inc()
            self._request_seconds.labels(protocol, method, outcome.model).observe(time.monotonic() - started)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
