"""Preemption: a small version of the experiment."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.scenarios import preemption

CRAWLING = replace(GPU_8B, name="crawling", bytes_per_second=0.1e9)
REGIMES = {"short prompts": preemption.REGIMES["short prompts"]}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return preemption.measure(lambda text: None, 50, 1, (GPU_8B, CRAWLING), REGIMES, buses=(4,))


def test_each_choice_is_made_where_it_is_the_only_one(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["choices"]["recompute"]["num_swapped"] == 0
    short = {row["machine"]: row["choices"] for row in result["rows"]}
    assert short["gpu-8b"]["swap"]["num_swapped"] > 20
    assert short["gpu-8b"]["recompute"]["num_recomputed"] > 20


def test_by_cost_follows_the_bus(result: dict[str, Any]) -> None:
    short = {row["machine"]: row["choices"]["auto"] for row in result["rows"]}
    assert short["gpu-8b"]["num_swapped"] > short["gpu-8b"]["num_recomputed"]
    assert short["crawling"]["num_recomputed"] > short["crawling"]["num_swapped"]


def test_behind_is_beside_the_better_of_both(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        seconds = {name: choice["seconds"] for name, choice in row["choices"].items()}
        assert row["behind"] == seconds["auto"] / min(seconds["swap"], seconds["recompute"]) - 1


def test_the_table_is_by_machine_and_regime_and_the_chart_over_the_bus(result: dict[str, Any]) -> None:
    table = preemption.table(result)
    assert [row[:2] for row in table.rows] == [[machine, "short prompts"] for machine in ("gpu-8b", "crawling")]
    assert all(len(row) == len(table.columns) for row in table.rows)
    (chart,) = preemption.charts(result)
    assert [series.points[0][0] for series in chart.series] == [4, 4, 4]
    assert len(result["targets"]) == 3
