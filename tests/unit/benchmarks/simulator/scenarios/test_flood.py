"""Chats beside a flood of jobs: a small version of the experiment."""

from typing import Any

import pytest

from benchmarks.simulator.presets import CPU_SMOLLM
from benchmarks.simulator.scenarios import flood


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return flood.measure(lambda text: None, cases=((CPU_SMOLLM, 1.0, 100),), num_chats=20)


def test_chats_beside_jobs_have_their_first_token_soon_under_fair_alone(result: dict[str, Any]) -> None:
    seconds = {row["policy"]: row["p99"] for row in result["rows"]}
    assert seconds["fair"] < 1
    assert seconds["fcfs"] > 10


def test_the_jobs_get_what_the_chats_leave(result: dict[str, Any]) -> None:
    [fair] = [row for row in result["rows"] if row["policy"] == "fair"]
    assert fair["job_tokens"] > 0.8 * fair["job_tokens_alone"]
    assert fair["device_share"] > 0.97


def test_a_row_for_each_machine_and_policy(result: dict[str, Any]) -> None:
    table = flood.table(result)
    assert [row[:2] for row in table.rows] == [["cpu-smollm", "fcfs"], ["cpu-smollm", "fair"]]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert len(result["targets"]) == 2
