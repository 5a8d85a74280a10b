"""Targets, and what every experiment has in common."""

import pytest

from benchmarks.plot import Chart, Series
from benchmarks.report import Cells, Sense, target_lines
from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.simulator.scenarios.scenario import Scenario, Target, outcome


@pytest.mark.parametrize(
    ("value", "sense", "holds"),
    [
        (0.95, Sense.AT_LEAST, True),
        (0.94, Sense.AT_LEAST, False),
        (5, Sense.AT_MOST, False),
        (0.95, Sense.AT_MOST, True),
    ],
)
def test_a_target_holds_on_its_side_of_the_bound(value: float, sense: Sense, holds: bool) -> None:
    assert Target("share", value, sense, 0.95, ".0%").holds is holds


def test_a_missed_target_is_marked() -> None:
    targets = [
        Target("share", 0.97, Sense.AT_LEAST, 0.95, ".0%"),
        Target("time, ms", 5.25, Sense.AT_MOST, 5, ".1f"),
    ]
    assert target_lines(outcome([], targets)) == [
        "share: 97%, target ≥ 95%",
        "**time, ms: 5.2, target ≤ 5.0: missed**",
    ]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_results_and_plots_are_kept_under_the_name(scenario: Scenario) -> None:
    assert scenario.result_path.name == f"simulator_{scenario.name}.json"
    assert scenario.plot_path.name == f"simulator_{scenario.name}.svg"


RESULT = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "machine": {"cores": 2, "processor": "Abacus"},
    **outcome([], [Target("speed", 3, Sense.AT_LEAST, 4, ".0f")]),
}


def test_a_section_has_the_picture_the_table_and_the_targets() -> None:
    scenario = Scenario(
        "speed",
        "How fast",
        lambda report: RESULT,
        lambda result: Cells(("speed",), [["3"]]),
        lambda result: [Chart("Speed", "x", [Series("ours", [(1, 3)])])],
    )
    assert scenario.section(RESULT) == (
        "2026-01-02, commit `0123456789ab`, 2 cores of Abacus.\n\n![How fast](simulator_speed.svg)\n\n"
        "| speed |\n| --- |\n| 3 |\n\n- **speed: 3, target ≥ 4: missed**"
    )


def test_an_experiment_without_charts_has_no_picture() -> None:
    scenario = Scenario("speed", "How fast", lambda report: RESULT, lambda result: Cells(("speed",), [["3"]]))
    assert "svg" not in scenario.section(RESULT)
