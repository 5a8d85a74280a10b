"""Ageing: how often requests are overtaken, and a small version of the experiment."""

import math
from typing import Any

import pytest

from benchmarks.simulator.arrivals import Arrival
from benchmarks.simulator.prompts import Script
from benchmarks.simulator.request_record import RequestRecord, TenantUsage
from benchmarks.simulator.scenarios import ageing
from benchmarks.simulator.scenarios.ageing import worst_overtaking
from scheduler_svc.core.request import FIRST_TOKEN_FACTOR


def record(
    at: float, priority: int, admitted_at: float | None, tenant: str = "a", prompt_seconds: float = 0.0
) -> RequestRecord:
    arrival = Arrival(at, 1, 1, 1, tenant=tenant, priority=priority)
    return RequestRecord(0, arrival, Script(0, None), 1, TenantUsage(), prompt_seconds, admitted_at=admitted_at)


def test_in_order_of_arrival_no_request_is_overtaken() -> None:
    assert worst_overtaking([record(1.0, 0, 0), record(2.0, 0, 1), record(4.0, 0, 2)], 10.0) == -1.0


def test_a_later_one_of_the_same_class_goes_before_by_what_it_came_later() -> None:
    assert worst_overtaking([record(1.0, 0, 1), record(3.5, 0, 0)], 10.0) == 2.5


def test_a_higher_class_may_come_later_by_the_ageing_of_each_class_between() -> None:
    assert worst_overtaking([record(1.0, 0, 1), record(20.0, 2, 0)], 10.0) == -1.0
    assert worst_overtaking([record(1.0, 0, 1), record(22.5, 2, 0)], 10.0) == 1.5


def test_a_lower_class_may_not_come_later() -> None:
    assert worst_overtaking([record(1.0, 2, 1), record(3.0, 0, 0)], 10.0) == 2.0


def test_a_later_one_may_go_before_a_long_prompt_until_that_is_due_under_fair_only() -> None:
    records = [record(1.0, 0, 1, prompt_seconds=0.5), record(3.5, 0, 0, prompt_seconds=0.1)]
    assert worst_overtaking(records, 10.0) == 2.5 - FIRST_TOKEN_FACTOR * 0.5
    assert worst_overtaking(records, 10.0, is_fair=False) == 2.5


def test_under_other_policies_requests_of_all_tenants_count() -> None:
    assert worst_overtaking([record(1.0, 0, 1), record(9.0, 0, 0, "b")], 10.0, is_fair=False) == 8.0


def test_in_one_step_none_is_before_another() -> None:
    assert worst_overtaking([record(1.0, 0, 1), record(3.5, 0, 1), record(2.0, 0, 0)], 10.0) == 1.0


def test_other_tenants_and_those_that_never_ran_do_not_count() -> None:
    assert worst_overtaking([record(1.0, 0, 1), record(9.0, 0, 0, "b"), record(0.0, 0, None)], 10.0) == -math.inf


def test_only_the_latest_of_each_class_before_matters() -> None:
    records = [record(5.0, 0, 2), record(7.0, 0, 0), record(6.0, 0, 1)]
    assert worst_overtaking(records, 10.0) == 2.0


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return ageing.measure(lambda text: None, num_requests=1_500, ageing_seconds=0.5)


def test_the_bound_holds_under_every_policy(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["num_requests"] == 1_500
        assert row["most_waiting"] > 100
        assert row["beyond_bound"] == 0


def test_priorities_matter_to_the_policies_that_know_them(result: dict[str, Any]) -> None:
    waits = {row["policy"]: [c["queued"]["p50"] for c in row["classes"]] for row in result["rows"]}
    for policy in ("priority", "fair"):
        assert waits[policy] == sorted(waits[policy])
        assert waits[policy][-1] > 2 * waits[policy][0]
    assert max(waits["fcfs"]) < 1.5 * min(waits["fcfs"])


def test_the_table_is_by_policy_and_priority(result: dict[str, Any]) -> None:
    table = ageing.table(result)
    assert [row[0] for row in table.rows] == ["fcfs", "priority", "fair"]
    assert all(len(row) == len(table.columns) == 8 for row in table.rows)
    assert [target["holds"] for target in result["targets"]] == [True] * 3
