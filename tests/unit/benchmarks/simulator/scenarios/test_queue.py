"""Steps over the length of the queue: a small version of the experiment."""

from typing import Any

import pytest

from benchmarks.simulator.scenarios import queue


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return queue.measure(lambda text: None, queued=(0, 40), num_running=32, num_steps=30)


def test_every_policy_is_measured_at_every_length(result: dict[str, Any]) -> None:
    assert [(row["policy"], row["num_queued"]) for row in result["rows"]] == [
        (policy, queued) for policy in ("fcfs", "priority", "fair") for queued in (0, 40)
    ]
    for row in result["rows"]:
        assert 0 < row["schedule"]["p50"] < row["both"]["p50"] <= row["both"]["p99"]
        assert 0 < row["commit"]["p50"] < row["both"]["p99"]


def test_requests_end_and_others_come_in_while_it_is_measured(result: dict[str, Any]) -> None:
    assert all(row["num_ended"] > 0 for row in result["rows"])


def test_the_table_is_by_policy_and_length(result: dict[str, Any]) -> None:
    table = queue.table(result)
    assert all(len(row) == len(table.columns) for row in table.rows)
    (chart,) = queue.charts(result)
    assert [(series.name, [x for x, _ in series.points]) for series in chart.series] == [
        (policy, [40]) for policy in ("fcfs", "priority", "fair")
    ]
    assert len(result["targets"]) == 6
