"""From what was written down of a run to figures."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulator.driver import CoreFigures
from benchmarks.simulator.life import Life
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.watch import Sample
from quire_client.bench.latency import percentile


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a duration over requests, in seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread | None":
        """None where there are none."""
        ordered = sorted(seconds)
        return cls(percentile(ordered, 50), percentile(ordered, 99)) if ordered else None


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Requests of one priority. From arrival to a first step, a first token, and the end, of those that got so far."""

    priority: int
    num_requests: int
    queued: Spread | None
    first_token: Spread | None
    whole: Spread | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run. `seconds` is modelled time; rates are by it. `failures` counts requests that did not get all their tokens.

    `device_share` is how much of the time devices computed; `tenants` what each was served, in tokens.
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
    """Figures of a run that is over, or as far as it got."""
    watch = simulation.watch
    failures: defaultdict[str, int] = defaultdict(int)
    by_class: defaultdict[int, list[Life]] = defaultdict(list)
    for life in watch.lives:
        by_class[life.arrival.priority].append(life)
        if life.failure is not None:
            failures[life.failure] += 1
    seconds = max((life.ended_at or simulation.now for life in watch.lives), default=0.0)
    accounts = watch.accounts.values()
    return RunFigures(
        seconds=seconds,
        num_requests=len(watch.lives),
        num_finished=sum(life.ended_at is not None and life.failure is None for life in watch.lives),
        failures=dict(sorted(failures.items())),
        num_steps=simulation.num_steps,
        prompt_tokens=sum(account.num_prompt for account in accounts),
        generated_tokens=watch.num_generated,
        generated_per_second=watch.num_generated / seconds if seconds else 0.0,
        device_share=simulation.device_seconds / seconds / simulation.setup.num_replicas if seconds else 0.0,
        classes=[_class(priority, lives) for priority, lives in sorted(by_class.items(), reverse=True)],
        tenants={tenant: account.num_tokens for tenant, account in sorted(watch.accounts.items())},
        core=simulation.driver.figures(),
        samples=watch.timeline.samples,
    )


def _class(priority: int, lives: Sequence[Life]) -> ClassFigures:
    def spread(times: Iterable[tuple[float | None, Life]]) -> Spread | None:
        return Spread.of(at - life.arrival.at for at, life in times if at is not None)

    return ClassFigures(
        priority=priority,
        num_requests=len(lives),
        queued=spread((life.admitted_at, life) for life in lives),
        first_token=spread((life.first_token_at, life) for life in lives),
        whole=spread((life.ended_at, life) for life in lives if life.failure is None),
    )


class ServedTokens:
    """What each tenant is served from `begin` to `end`, in seconds of a simulation that is still to run until then."""

    def __init__(self, simulation: Simulation, begin: float, end: float) -> None:
        self._accounts = simulation.watch.accounts
        self._at_begin: dict[str, int] = {}
        self._at_end: dict[str, int] = {}
        simulation.call_at(begin, lambda: self._at_begin.update(self._now()))
        simulation.call_at(end, lambda: self._at_end.update(self._now()))

    @property
    def by_tenant(self) -> dict[str, int]:
        """Tokens, by tenant."""
        return {tenant: count - self._at_begin.get(tenant, 0) for tenant, count in sorted(self._at_end.items())}

    def _now(self) -> dict[str, int]:
        return {tenant: account.num_tokens for tenant, account in self._accounts.items()}
