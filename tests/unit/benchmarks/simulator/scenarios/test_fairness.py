"""Fairness: a small version of the experiment."""

from typing import Any

import pytest

from benchmarks.simulator.scenarios import fairness


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return fairness.measure(lambda text: None, rates=(21.0,), factors=(1, 10), warm_up=2.0, window=4.0)


def test_only_fair_keeps_what_the_nine_had(result: dict[str, Any]) -> None:
    shares = {row["policy"]: row["least_share"] for row in result["rows"] if row["factor"] == 10}
    assert shares["fair"] > 0.9
    assert shares["fcfs"] < 0.6
    assert shares["priority"] < 0.6


def test_alike_they_are_served_alike(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["factor"] == 1:
            served = [row["heavy_tokens"], *row["others_tokens"].values()]
            assert len(served) == 10
            assert row["policy"] != "fair" or max(served) < 1.1 * min(served)
            assert row["least_share"] == 1


def test_the_table_is_by_policy(result: dict[str, Any]) -> None:
    table = fairness.table(result)
    assert [row[0] for row in table.rows] == ["fcfs", "priority", "fair"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    (chart,) = fairness.charts(result)
    assert [(series.name, len(series.points)) for series in chart.series] == [("fcfs", 2), ("priority", 2), ("fair", 2)]
    assert len(result["targets"]) == 1
