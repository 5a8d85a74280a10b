"""Figures of a run, from its records."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulator.driver import CoreFigures
from benchmarks.simulator.recorder import Sample
from benchmarks.simulator.request_record import RequestRecord
from benchmarks.simulator.simulation import Simulation
from quire_client.bench.latency import percentile


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a duration over requests, in seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles | None":
        """None without values."""
        ordered = sorted(seconds)
        return cls(percentile(ordered, 50), percentile(ordered, 99)) if ordered else None


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Requests of one priority. From arrival to a first step, a first token, and the end, of those that reached it."""

    priority: int
    num_requests: int
    queued: Percentiles | None
    first_token: Percentiles | None
    whole: Percentiles | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run. `seconds` is modelled time; rates are by it. `failures` counts requests that did not get all their tokens.

    `device_share` is the share of the time in which devices computed; `tenants` the tokens served to each.
    """

    seconds: float
    num_requests: int
    num_finished: int
    failures: dict[str, int]
    num_steps: int
    prompt_tokens: int
    generated_tokens: int
    generated_per_second: float
    device_share: float
    classes: list[ClassFigures]
    tenants: dict[str, int]
    core: CoreFigures
    samples: list[Sample]

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        return asdict(self)


def run_figures(simulation: Simulation) -> RunFigures:
    """Figures of a run that has ended or was stopped."""
    recorder = simulation.recorder
    failures: defaultdict[str, int] = defaultdict(int)
    by_class: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    for record in recorder.records:
        by_class[record.arrival.priority].append(record)
        if record.failure is not None:
            failures[record.failure] += 1
    seconds = max((record.ended_at or simulation.now for record in recorder.records), default=0.0)
    usage_by_tenant = recorder.usage_by_tenant.values()
    return RunFigures(
        seconds=seconds,
        num_requests=len(recorder.records),
        num_finished=sum(record.ended_at is not None and record.failure is None for record in recorder.records),
        failures=dict(sorted(failures.items())),
        num_steps=simulation.num_steps,
        prompt_tokens=sum(tenant_usage.num_prompt for tenant_usage in usage_by_tenant),
        generated_tokens=recorder.num_generated,
        generated_per_second=recorder.num_generated / seconds if seconds else 0.0,
        device_share=simulation.device_seconds / seconds / simulation.setup.num_replicas if seconds else 0.0,
        classes=[_class(priority, records) for priority, records in sorted(by_class.items(), reverse=True)],
        tenants={tenant: tenant_usage.num_tokens for tenant, tenant_usage in sorted(recorder.usage_by_tenant.items())},
        core=simulation.driver.figures(),
        samples=recorder.timeline.samples,
    )


def _class(priority: int, records: Sequence[RequestRecord]) -> ClassFigures:
    def spread(times: Iterable[tuple[float | None, RequestRecord]]) -> Percentiles | None:
        return Percentiles.of(at - record.arrival.at for at, record in times if at is not None)

    return ClassFigures(
        priority=priority,
        num_requests=len(records),
        queued=spread((record.admitted_at, record) for record in records),
        first_token=spread((record.first_token_at, record) for record in records),
        whole=spread((record.ended_at, record) for record in records if record.failure is None),
    )


class ServedTokens:
    """Tokens served to each tenant from `begin` to `end`, in seconds of a simulation that is run later."""

    def __init__(self, simulation: Simulation, begin: float, end: float) -> None:
        self._accounts = simulation.recorder.usage_by_tenant
        self._at_begin: dict[str, int] = {}
        self._at_end: dict[str, int] = {}
        simulation.call_at(begin, lambda: self._at_begin.update(self._now()))
        simulation.call_at(end, lambda: self._at_end.update(self._now()))

    @property
    def by_tenant(self) -> dict[str, int]:
        return {tenant: count - self._at_begin.get(tenant, 0) for tenant, count in sorted(self._at_end.items())}

    def _now(self) -> dict[str, int]:
        return {tenant: tenant_usage.num_tokens for tenant, tenant_usage in self._accounts.items()}
