"""The metrics that the services register: series by name, with types and labels."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

import worker_svc.metrics  # noqa: F401 (it registers metrics, as the modules that are imported with others do)
from checksum_service import ChecksumService
from gateway_svc.metrics import GatewayMetrics
from scheduler_svc.collector import EngineCollector
from scheduler_svc.core.kv.block_hash_report import BlockHashReport
from scheduler_svc.core.replica import Replica
from scheduler_svc.step_wire import shape_from_proto
from worker_links import deployment

TARGET_LABELS = frozenset({"job", "instance"})
"""Labels that Prometheus adds to all series of a target."""
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


class Series(NamedTuple):
    """What the series of a name have in common."""

    type: str
    labels: frozenset[str]


@asynccontextmanager
async def registries() -> AsyncIterator[list[CollectorRegistry]]:
    """Registries with the metrics of all services. They can be read within the block."""
    async with deployment() as running:
        about = ChecksumService(num_host_blocks=1).about
        replica = Replica(shape_from_proto(about), name="worker")
        running.engine.add_worker(replica, about, asyncio.Event(), BlockHashReport({}, {}))
        running.engine.mark_set_apart("10.0.0.1:50053", "why")
        engine = CollectorRegistry()
        engine.register(EngineCollector(running.engine))
        yield [REGISTRY, engine, GatewayMetrics(["m"]).registry]


async def exported_series() -> dict[str, Series]:
    """All series of Quire by name. Those of a histogram end with `_bucket`, `_sum` and `_count`."""
    async with registries() as read:
        series = [one for registry in read for one in _series_of(registry)]
    return {name: one for name, one in series if name.startswith("quire_")}


def _series_of(registry: CollectorRegistry) -> Iterator[tuple[str, Series]]:
    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            if isinstance(collector, MetricWrapperBase):
                labels |= set(collector._labelnames)  # it may have no sample yet
            for suffix in _SUFFIXES.get(metric.type, ("",)):
                bound = {"le"} if suffix == "_bucket" else set()
                yield metric.name + suffix, Series(metric.type, frozenset(labels | bound))


def series_in(expression: str) -> list[tuple[str, set[str]]]:
    """The series that a PromQL expression names, each with the labels of its matchers."""
    found = re.findall(r"(quire_[a-z_]+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers))) for name, matchers in found]


def unknown_in(expression: str, series: dict[str, Series]) -> list[str]:
    """Names and labels of an expression that no service exports. Any series has those of its target, such as `job`."""
    named = series_in(expression)
    labels = set(TARGET_LABELS).union(*(series[name].labels for name, _ in named if name in series))
    grouped = ",".join(re.findall(r"\b(?:by|on|ignoring) ?\(([^)]*)\)", expression))
    return [
        *(name for name, _ in named if name not in series),
        *(
            f"{name}: {label}"
            for name, matched in named
            if name in series
            for label in matched - series[name].labels - TARGET_LABELS
        ),
        *(label for label in re.findall(r"\w+", grouped) if label not in labels),
    ]
