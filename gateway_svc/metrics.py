"""The gateway's Prometheus metrics. Labels hold only values of ours, never a client's."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

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

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

Protocol = Literal["grpc", "http"]


@dataclass(slots=True)
class CallOutcome:
    """How a call ended, as its protocol says it: a gRPC status name or an HTTP status."""

    code: str


class TokenMetrics(Collector):
    """Tokens generated, and the time between those of a sequence.

    They are noted for every token on the one thread that there is: without the lock and the walk over the buckets that
    an observation of prometheus_client's costs.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_gaps = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._gap_seconds = 0.0

    def add_tokens(self, num_tokens: int) -> None:
        """Notes tokens that came together."""
        self._num_tokens += num_tokens

    def observe_gap(self, seconds: float) -> None:
        """Notes the time between two tokens."""
        self._num_gaps[bisect_left(_TOKEN_BUCKETS, seconds)] += 1
        self._gap_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """What a scrape is told."""
        yield CounterMetricFamily("quire_gateway_generation_tokens", "Tokens generated", value=self._num_tokens)
        bounds = map(floatToGoString, (*_TOKEN_BUCKETS, float("inf")))
        yield HistogramMetricFamily(
            "quire_gateway_inter_token_latency_seconds",
            "Time between tokens of a sequence",
            buckets=list(zip(bounds, accumulate(self._num_gaps), strict=True)),
            sum_value=self._gap_seconds,
        )


class GatewayMetrics:
    """One gateway's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._requests = Counter(
            "quire_gateway_requests", "Calls answered", ["protocol", "method", "code"], registry=self._registry
        )
        self._request_seconds = Histogram(
            "quire_gateway_request_seconds",
            "Time from a call to the end of its answer",
            ["protocol", "method"],
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "quire_gateway_requests_in_flight", "Requests to generate that run now", registry=self._registry
        )
        self.first_token_seconds = Histogram(
            "quire_gateway_time_to_first_token_seconds",
            "Time from a call to the first token of each of its requests",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "quire_gateway_prompt_tokens", "Prompt tokens of accepted requests", registry=self._registry
        )
        self.tokens = TokenMetrics()
        self._registry.register(self.tokens)

    @contextmanager
    def call(self, protocol: Protocol, method: str, code: str) -> Iterator[CallOutcome]:
        """Counts and times one call. Its code is `code` unless the block sets another."""
        started = time.monotonic()
        outcome = CallOutcome(code)
        try:
            yield outcome
        finally:
            self._requests.labels(protocol, method, outcome.code).inc()
            self._request_seconds.labels(protocol, method).observe(time.monotonic() - started)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
