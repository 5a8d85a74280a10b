"""Simulations of the real core: times that can be computed by hand, and consistent totals."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from benchmarks.simulator.arrivals import Arrival, ClosedLoop, OpenLoop
from benchmarks.simulator.driver import PreemptionMode, Setup
from benchmarks.simulator.figures import run_figures
from benchmarks.simulator.machine import CopyMode, Machine
from benchmarks.simulator.plan_checker import check_plans
from benchmarks.simulator.presets import GPU_8B
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.synthetic import ArrivalStream, Lengths, Prefixes

# A step of n tokens takes n seconds, messages take none.
MACHINE = replace(
    GPU_8B,
    step_seconds=((1, 1.0), (2, 2.0)),
    context_seconds=0.0,
    pair_seconds=0.0,
    dispatch_seconds=0.0,
    transfer_seconds=0.0,
    num_blocks=64,
    num_host_blocks=64,
    max_sequences=8,
    max_step_tokens=64,
)


def simulated(arrivals: Iterable[Arrival], machine: Machine = MACHINE, num_replicas: int = 1) -> Simulation:
    simulation = Simulation(Setup(machine, num_replicas), OpenLoop(arrivals))
    simulation.run()
    return simulation


def test_one_request_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    simulation = simulated([Arrival(2.0, prompt_tokens=10, output_tokens=5, max_tokens=5)])
    (record,) = simulation.recorder.records
    assert (record.admitted_at, record.first_token_at, record.ended_at) == (2.0, 2.0 + 10, 2.0 + 10 + 4)
    assert record.num_generated == 5
    assert record.failure is None


def test_a_step_has_the_usual_number_of_tokens_while_nothing_decodes() -> None:
    # The last two come while two steps are in flight.
    arrivals = [Arrival(at, num_tokens, 1, 1) for at, num_tokens in ((0.0, 10), (1.0, 10), (2.0, 32), (2.0, 32))]
    records = simulated(arrivals, replace(MACHINE, usual_step_tokens=32)).recorder.records
    assert [record.first_token_at for record in records] == [10.0, 20.0, 52.0, 84.0]
    records = simulated(arrivals).recorder.records
    assert [record.first_token_at for record in records] == [10.0, 20.0, 84.0, 84.0]


def test_a_request_of_several_sequences_ends_with_the_last_of_them() -> None:
    (record,) = simulated([Arrival(0.0, 10, 5, 5, n=3)]).recorder.records
    assert (record.num_generated, record.num_ended) == (15, 3)
    assert record.first_token_at is not None
    # Three tokens in each step after the first tokens.
    assert record.ended_at == pytest.approx(record.first_token_at + 4 * 3, abs=3)
    assert record.tenant_usage.num_prompt == 10


def test_messages_take_their_time_but_the_next_step_is_there_before_it_is_needed() -> None:
    simulation = simulated([Arrival(0.0, 10, 5, 5)], replace(MACHINE, dispatch_seconds=0.25))
    (record,) = simulation.recorder.records
    assert (record.first_token_at, record.ended_at) == (0.25 + 10 + 0.25, 0.25 + 14 + 0.25)


def test_attention_is_paid_for_what_is_looked_back_on() -> None:
    simulation = simulated([Arrival(0.0, 4, 3, 3)], replace(MACHINE, context_seconds=0.01, pair_seconds=0.1))
    (record,) = simulation.recorder.records
    assert record.first_token_at == pytest.approx(4 + 0.1 * (1 + 2 + 3 + 4))
    assert record.ended_at == pytest.approx(5.0 + 1 + 0.01 * 4 + 1 + 0.01 * 5)


def test_a_request_waits_for_the_steps_that_are_under_way() -> None:
    first, second = simulated([Arrival(0.0, 10, 9, 9), Arrival(0.5, 3, 1, 1)]).recorder.records
    # At 0.5 two steps are in flight: the first prompt until 10, a decode until 11. Then 3 + 1 tokens are computed.
    assert first.first_token_at == 10
    assert second.admitted_at == 10
    assert second.first_token_at == 11 + 4


def test_two_replicas_take_a_request_each_and_one_takes_both_in_turn() -> None:
    arrivals = [Arrival(0.0, 10, 1, 1), Arrival(0.0, 10, 1, 1)]
    assert [record.ended_at for record in simulated(arrivals, num_replicas=2).recorder.records] == [10, 10]
    one = replace(MACHINE, max_sequences=1)
    assert [record.ended_at for record in simulated(arrivals, one).recorder.records] == [10, 20]


def test_an_output_that_stops_early_ends_there() -> None:
    simulation = simulated([Arrival(0.0, 10, output_tokens=3, max_tokens=50)])
    (record,) = simulation.recorder.records
    assert (record.num_generated, record.ended_at, record.failure) == (3, 12.0, None)


def test_a_prefix_that_is_there_is_not_computed_again() -> None:
    prompt = tuple(range(100, 148))  # three blocks
    arrivals = [Arrival(0.0, 48, 1, 1, prompt=prompt), Arrival(100.0, 49, 1, 1, prompt=(*prompt, 7))]
    simulation = simulated(arrivals)
    first, second = simulation.recorder.records
    assert (first.ended_at, second.ended_at) == (48.0, 101.0)
    figures = simulation.driver.figures()
    assert (figures.num_looked_up, figures.num_found_on_device) == (48 + 49, 48)


def test_a_client_sends_the_next_when_the_last_has_ended() -> None:
    traffic = ClosedLoop([Arrival(0.0, 10, 1, 1)] * 3, num_clients=1, think_seconds=5.0)
    simulation = Simulation(Setup(MACHINE), traffic)
    simulation.run()
    assert [(record.arrival.at, record.ended_at) for record in simulation.recorder.records] == [
        (0, 10),
        (15, 25),
        (30, 40),
    ]


def test_a_deadline_ends_a_request_soon_after_it() -> None:
    one = replace(MACHINE, max_sequences=1)
    late = Arrival(0.0, 10, 1, 1, deadline=5.0)
    first, second = simulated([Arrival(0.0, 10, 30, 30), late], one).recorder.records
    assert first.failure is None
    assert second.failure == "DEADLINE_EXCEEDED"
    assert second.ended_at == pytest.approx(5.0, abs=0.11)
    assert second.num_generated == 0


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    simulation = simulated([Arrival(0.0, 20_000, 1, 1), Arrival(0.0, 4, 2, 2)])
    assert [record.failure for record in simulation.recorder.records] == ["CONTEXT_LENGTH_EXCEEDED", None]
    assert run_figures(simulation).failures == {"CONTEXT_LENGTH_EXCEEDED": 1}


def test_a_run_can_be_left_at_a_time_and_watched_at_another() -> None:
    simulation = Simulation(Setup(MACHINE), OpenLoop([Arrival(0.0, 10, 50, 50)]))
    seen: list[int] = []
    simulation.call_at(15.5, lambda: seen.append(simulation.recorder.num_generated))
    simulation.run(until=20.5)
    assert seen == [6]
    assert (simulation.now, simulation.recorder.num_generated, simulation.recorder.num_live) == (20.5, 11, 1)


# Loads under which blocks run out.

CROWD = ArrivalStream(20.0, Lengths(8, 40), Lengths(1, 60), prefixes=Prefixes(2, 48, 0.5), max_tokens=60)
TIGHT = replace(MACHINE, step_seconds=((1, 0.01), (2, 0.02)), num_blocks=24, block_bytes=1, bytes_per_second=100.0)


@pytest.mark.parametrize("copies", CopyMode)
@pytest.mark.parametrize("preemption", PreemptionMode)
def test_every_token_is_committed_once_and_integrity_holds_after_each_step(
    copies: CopyMode, preemption: PreemptionMode
) -> None:
    setup = Setup(replace(TIGHT, copies=copies), num_replicas=2, preemption=preemption)
    arrivals = list(CROWD.arrivals(0, 80))
    simulation = Simulation(setup, OpenLoop(arrivals))
    check_plans(simulation)
    simulation.run()
    records = simulation.recorder.records
    assert [record.num_generated for record in records] == [arrival.output_tokens for arrival in arrivals]
    figures = run_figures(simulation)
    assert figures.num_finished == len(arrivals)
    assert figures.generated_tokens == sum(arrival.output_tokens for arrival in arrivals)
    assert figures.prompt_tokens == sum(arrival.prompt_tokens for arrival in arrivals)
    assert figures.core.num_swapped + figures.core.num_recomputed > 0
    memory = simulation.driver.memory()
    assert (memory.used, memory.host_used) == (0, 0)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def run(seed: int) -> dict[str, object]:
        simulation = Simulation(Setup(TIGHT, num_replicas=3), OpenLoop(CROWD.arrivals(seed, 60)), seed=seed)
        simulation.run()
        return run_figures(simulation).to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_work_is_not_counted_by_how_it_is_spread() -> None:
    """More replicas finish the same tokens in less time, and no device computes more than all of the time."""
    seconds = []
    for num_replicas in (1, 2, 4):
        simulation = simulated(CROWD.arrivals(0, 60), TIGHT, num_replicas)
        figures = run_figures(simulation)
        assert figures.device_share <= 1
        seconds.append(figures.seconds)
    assert seconds[0] > seconds[1] >= seconds[2]
