"""Figures computed from the events of requests."""

import pytest

from benchmarks.simulator.arrivals import Arrival, OpenLoop
from benchmarks.simulator.driver import Setup
from benchmarks.simulator.figures import Percentiles, ServedTokens, run_figures
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.simulation import Simulation


def test_a_spread_is_of_what_there_is() -> None:
    spread = Percentiles.of(float(number) for number in range(101))
    assert spread is not None
    assert (spread.p50, spread.p99) == (50, 99)
    assert Percentiles.of([]) is None


def test_latencies_are_by_priority_the_highest_first() -> None:
    arrivals = [Arrival(1.0, 16, 4, 4, priority=priority) for priority in (0, 2, 0)]
    simulation = Simulation(Setup(GPU_8B), OpenLoop(arrivals))
    simulation.run()
    figures = run_figures(simulation)
    assert [(c.priority, c.num_requests) for c in figures.classes] == [(2, 1), (0, 2)]
    for one in figures.classes:
        assert one.queued is not None
        assert one.first_token is not None
        assert one.whole is not None
        assert 0 <= one.queued.p50 < one.first_token.p50 < one.whole.p50


def test_tenants_have_their_served_tokens() -> None:
    arrivals = [Arrival(0.0, 16, 4, 4, "a"), Arrival(0.0, 20, 5, 5, "b"), Arrival(1.0, 7, 1, 1, "a")]
    simulation = Simulation(Setup(GPU_8B), OpenLoop(arrivals))
    simulation.run()
    figures = run_figures(simulation)
    assert figures.tenants == {"a": 16 + 4 + 7 + 1, "b": 20 + 5}
    assert figures.generated_per_second == pytest.approx(10 / figures.seconds)


def test_a_run_without_requests_has_no_rates() -> None:
    simulation = Simulation(Setup(GPU_8B), OpenLoop([]))
    simulation.run()
    figures = run_figures(simulation)
    assert (figures.num_requests, figures.generated_per_second, figures.classes) == (0, 0.0, [])


def test_a_window_counts_what_is_served_within_it() -> None:
    within = [Arrival(2.0, 20, 5, 5, "b"), Arrival(3.0, 7, 1, 1, "a")]
    arrivals = [Arrival(0.0, 16, 4, 4, "a"), *within, Arrival(9.0, 1, 1, 1)]
    simulation = Simulation(Setup(GPU_8B), OpenLoop(arrivals))
    window = ServedTokens(simulation, 1.0, 5.0)
    simulation.run()
    assert window.by_tenant == {"a": 7 + 1, "b": 20 + 5}
