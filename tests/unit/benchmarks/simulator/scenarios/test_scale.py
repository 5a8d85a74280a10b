"""How long simulations take: a small version of the experiment."""

from typing import Any

import pytest

from benchmarks.simulator.scenarios import scale


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return scale.measure(lambda text: None, num_requests=(60, 120), num_replicas=(1, 3))


def test_every_size_is_run(result: dict[str, Any]) -> None:
    rows = result["rows"]
    assert [(row["num_requests"], row["num_replicas"]) for row in rows] == [(60, 1), (60, 3), (120, 1), (120, 3)]
    for row in rows:
        assert row["took_seconds"] > 0
        assert row["generated_tokens"] > 16 * row["num_requests"]
    assert rows[0]["generated_tokens"] == rows[1]["generated_tokens"]


def test_the_table_is_by_size(result: dict[str, Any]) -> None:
    table = scale.table(result)
    assert [row[:2] for row in table.rows] == [["60", "1"], ["60", "3"], ["120", "1"], ["120", "3"]]
    (chart,) = scale.charts(result)
    assert [[x for x, _ in series.points] for series in chart.series] == [[1, 3], [1, 3]]
    assert result["targets"] == []
