"""Experiments and runs as Markdown, tables and charts, from the results that were written."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.result_text import origin
from benchmarks.simulator.figures import Percentiles, RunFigures
from benchmarks.simulator.scenarios.scenario import Scenario, target_lines
from benchmarks.tables import Cells


def scenario_section(scenario: Scenario) -> Callable[[dict[str, Any]], str]:
    """What docs/policies.md says of an experiment."""

    def section(result: dict[str, Any]) -> str:
        picture = f"\n\n![{scenario.title}]({scenario.plot_path.name})" if scenario.charts is not None else ""
        targets = "\n".join(f"- {line}" for line in target_lines(result))
        return f"{origin(result)}.{picture}\n\n{scenario.table(result).markdown()}\n\n{targets}"

    return section


def class_table(figures: RunFigures) -> Cells:
    """A row for each priority of a run: p50 / p99 in seconds."""
    rows = [
        [str(c.priority), f"{c.num_requests:,}", *(_spread(spread) for spread in (c.queued, c.first_token, c.whole))]
        for c in figures.classes
    ]
    return Cells(("priority", "requests", "queued, s", "to first token, s", "to the end, s"), rows, num_labels=0)


def tenant_table(served: Mapping[str, int]) -> Cells:
    """A row for each tenant: tokens served, and its share of all."""
    total = sum(served.values()) or 1
    rows = [[tenant, f"{count:,}", f"{count / total:.1%}"] for tenant, count in served.items()]
    return Cells(("tenant", "tokens served", "of all"), rows)


def run_lines(figures: RunFigures) -> list[str]:
    """The other figures of a run, a line each."""
    core = figures.core
    looked_up = core.num_looked_up or 1
    failures = ", ".join(f"{count:,} {reason}" for reason, count in figures.failures.items()) or "none"
    return [
        f"{figures.num_finished:,} of {figures.num_requests:,} requests finished in {figures.seconds:,.1f} s; "
        f"failed: {failures}",
        f"{figures.generated_per_second:,.0f} tokens/s generated; devices computed {figures.device_share:.1%} of it",
        f"preemptions: {core.num_swapped:,} by swap, {core.num_recomputed:,} by recompute",
        f"prompt tokens found: {core.num_found_on_device / looked_up:.1%} on the device, "
        f"{core.num_found_on_host / looked_up:.1%} on the host",
    ]


def _spread(spread: Percentiles | None) -> str:
    return "–" if spread is None else f"{spread.p50:,.3f} / {spread.p99:,.3f}"
