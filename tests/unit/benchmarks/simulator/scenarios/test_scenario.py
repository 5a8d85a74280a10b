"""Targets, and what every experiment has in common."""

import pytest

from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.simulator.scenarios.scenario import Scenario, Sense, Target, outcome, target_lines


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


def test_what_is_missed_is_said_so() -> None:
    targets = [
        Target("share", 0.97, Sense.AT_LEAST, 0.95, ".0%"),
        Target("time, ms", 5.25, Sense.AT_MOST, 5, ".1f"),
    ]
    assert target_lines(outcome([], targets)) == [
        "share: 97%, asked ≥ 95%",
        "**time, ms: 5.2, asked ≤ 5.0: missed**",
    ]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_results_and_plots_are_kept_under_the_name(scenario: Scenario) -> None:
    assert scenario.result_path.name == f"simulator_{scenario.name}.json"
    assert scenario.plot_path.name == f"simulator_{scenario.name}.svg"
