"""What is written of experiments and runs."""

from benchmarks.plot import Chart, Series
from benchmarks.simulator.arrivals import Arrival, OpenLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import run_figures
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.report import class_table, run_lines, scenario_section, tenant_table
from benchmarks.simulator.scenarios.scenario import Scenario, Sense, Target, outcome
from benchmarks.simulator.simulation import Simulation
from benchmarks.tables import Cells

RESULT = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "machine": {"cores": 2, "processor": "Abacus"},
    **outcome([], [Target("speed", 3, Sense.AT_LEAST, 4, ".0f")]),
}


def test_a_section_has_the_picture_the_table_and_what_was_asked() -> None:
    scenario = Scenario(
        "speed",
        "How fast",
        lambda report: RESULT,
        lambda result: Cells(("speed",), [["3"]]),
        lambda result: [Chart("Speed", "x", [Series("ours", [(1, 3)])])],
    )
    assert scenario_section(scenario)(RESULT) == (
        "2026-01-02, commit `0123456789ab`, 2 cores of Abacus.\n\n![How fast](simulator_speed.svg)\n\n"
        "| speed |\n| --- |\n| 3 |\n\n- **speed: 3, asked ≥ 4: missed**"
    )


def test_an_experiment_without_charts_has_no_picture() -> None:
    scenario = Scenario("speed", "How fast", lambda report: RESULT, lambda result: Cells(("speed",), [["3"]]))
    assert "svg" not in scenario_section(scenario)(RESULT)


def test_a_run_is_told_by_class_and_tenant() -> None:
    simulation = Simulation(
        Setup(GPU_8B),
        OpenLoop([Arrival(0.0, 16, 4, 4, "a"), Arrival(0.0, 50_000, 4, 4, "b"), Arrival(0.0, 16, 44, 44, "b", 1.0, 1)]),
    )
    simulation.run()
    figures = run_figures(simulation)
    assert [row[:2] for row in class_table(figures).rows] == [["1", "1"], ["0", "2"]]
    assert tenant_table(figures.tenants).rows == [["a", "20", "25.0%"], ["b", "60", "75.0%"]]
    first, *_ = run_lines(figures)
    assert first.startswith("2 of 3 requests finished")
    assert first.endswith("failed: 1 CONTEXT_LENGTH_EXCEEDED")
