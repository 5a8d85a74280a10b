"""The defaults of the cost model, and how it learns."""

import math
import random

import pytest

from scheduler_svc.core.costs import CostModel, count_pairs
from scheduler_svc.core.step import Direction

BLOCK_BYTES = 1 << 20


def model(swap_rate: float = 10e9, prefill_rate: float = 20_000.0) -> CostModel:
    return CostModel(BLOCK_BYTES, swap_rate, prefill_rate)


def run_steps(costs: CostModel, rng: random.Random, num_steps: int, slower: float = 1.0, noise: float = 0.1) -> None:
    """Steps of 4 ms, 20 µs a prefill token and 100 µs a decode."""
    for _ in range(num_steps):
        num_prefill, num_decodes = rng.choice([0, 0, 64, 512]), rng.randint(1, 64)
        seconds = 4e-3 + 20e-6 * num_prefill + 100e-6 * num_decodes
        costs.observe_step(num_prefill, num_decodes, slower * seconds * rng.uniform(1 - noise, 1 + noise))


def test_priors_count_before_the_first_observation() -> None:
    costs = model()
    assert costs.swap_seconds(3, 2) == pytest.approx(5 * BLOCK_BYTES / 10e9)
    assert costs.recompute_seconds(100) == pytest.approx(100 / 20_000)
    assert costs.step_seconds(100, 0) == pytest.approx(100 / 20_000)
    assert costs.tokens_per_second == 0.0


def test_unknown_copies_cost_infinitely_much() -> None:
    costs = model(swap_rate=0.0)
    assert costs.swap_seconds(1, 1) == math.inf
    assert costs.swap_seconds(0, 0) == 0.0
    costs.observe_swap(10, Direction.OUT, 0.01)
    assert costs.swap_seconds(10, 0) == pytest.approx(0.01, rel=0.3)
    assert costs.swap_seconds(10, 1) == math.inf


def test_unknown_prefill_rate_is_learned() -> None:
    costs = model(prefill_rate=0.0)
    assert costs.recompute_seconds(100) > 0
    run_steps(costs, random.Random(1), 600)
    assert costs.recompute_seconds(100) == pytest.approx(100 * 20e-6, rel=0.1)


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_steps_are_learned_from_noisy_times_whatever_the_prior(wrong: float) -> None:
    costs = model(prefill_rate=wrong / 20e-6)
    run_steps(costs, random.Random(2), 500)
    assert costs.recompute_seconds(1000) == pytest.approx(1000 * 20e-6, rel=0.1)
    assert costs.step_seconds(0, 32) == pytest.approx(4e-3 + 32 * 100e-6, rel=0.1)
    assert costs.step_seconds(512, 8) == pytest.approx(4e-3 + 512 * 20e-6 + 8 * 100e-6, rel=0.1)


def test_single_outliers_barely_move_an_estimate() -> None:
    costs, rng = model(), random.Random(3)
    costs.observe_step(16, 1, 10.0)  # a compilation
    for _ in range(20):
        run_steps(costs, rng, 40)
        costs.observe_step(0, 8, 3.0)  # a process that was stopped
    run_steps(costs, rng, 5)
    assert costs.recompute_seconds(1000) == pytest.approx(1000 * 20e-6, rel=0.2)
    assert costs.step_seconds(0, 32) == pytest.approx(4e-3 + 32 * 100e-6, rel=0.2)


def test_change_that_lasts_is_followed() -> None:
    costs, rng = model(), random.Random(4)
    run_steps(costs, rng, 500)
    run_steps(costs, rng, 500, slower=8.0)
    assert costs.recompute_seconds(1000) == pytest.approx(8 * 1000 * 20e-6, rel=0.15)


def test_prefill_is_not_forgotten_while_only_decodes_run() -> None:
    costs, rng = model(), random.Random(5)
    run_steps(costs, rng, 300)
    before = costs.recompute_seconds(1000)
    for _ in range(5_000):
        costs.observe_step(0, 8, (4e-3 + 8 * 100e-6) * rng.uniform(0.9, 1.1))
    assert costs.recompute_seconds(1000) == pytest.approx(before, rel=0.01)
    assert costs.step_seconds(0, 8) == pytest.approx(4e-3 + 8 * 100e-6, rel=0.05)


@pytest.mark.parametrize("direction", Direction)
def test_transfers_are_learned_by_direction(direction: Direction) -> None:
    costs, rng = model(), random.Random(6)
    for _ in range(100):
        num_blocks = rng.randint(1, 100)
        costs.observe_swap(num_blocks, direction, (50e-6 + 300e-6 * num_blocks) * rng.uniform(0.9, 1.1))
    ways = {Direction.OUT: (40, 0), Direction.IN: (0, 40)}
    others = ways[Direction.OUT if direction is Direction.IN else Direction.IN]
    assert costs.swap_seconds(*ways[direction]) == pytest.approx(50e-6 + 40 * 300e-6, rel=0.1)
    assert costs.swap_seconds(*others) == pytest.approx(40 * BLOCK_BYTES / 10e9), "of the other nothing is known"


def test_swap_and_recompute_are_each_cheaper_somewhere_and_a_throttled_copy_changes_which() -> None:
    costs, rng = model(), random.Random(7)
    run_steps(costs, rng, 300)
    assert costs.swap_seconds(20, 20) < costs.recompute_seconds(320)
    assert costs.swap_seconds(20, 20) > costs.recompute_seconds(10)
    for _ in range(60):
        for direction in Direction:
            costs.observe_swap(20, direction, 20 * 5e-3 * rng.uniform(0.9, 1.1))
    assert costs.swap_seconds(20, 20) > costs.recompute_seconds(320)


def test_throughput_is_that_of_the_last_steps() -> None:
    costs = model()
    for _ in range(1000):
        costs.observe_step(100, 20, 0.05)
    assert costs.tokens_per_second == pytest.approx(120 / 0.05, rel=0.01)


def test_time_of_prompts_by_that_of_decodes_is_of_the_last_steps() -> None:
    costs = model()
    assert costs.prompt_factor == 0.0
    for place in range(1000):
        num_prefill = 400 * (place % 2)
        costs.observe_step(num_prefill, 20, 0.01 + 20e-6 * num_prefill)
    assert costs.prompt_factor == pytest.approx(0.008 / (2 * 0.01), rel=0.05)
    for _ in range(1000):
        costs.observe_step(1000, 0, 20e-3)
    assert costs.prompt_factor == pytest.approx(0.008 / (2 * 0.01), rel=0.05), "steps of prompts alone count not"
    for _ in range(1000):
        costs.observe_step(0, 20, 0.01)
    assert costs.prompt_factor < 0.01


def test_empty_observations_change_nothing() -> None:
    costs = model()
    costs.observe_step(0, 0, 1.0)
    costs.observe_swap(0, Direction.OUT, 1.0)
    assert costs.step_seconds(0, 1) == model().step_seconds(0, 1)
    assert costs.swap_seconds(1, 1) == model().swap_seconds(1, 1)


def test_step_is_never_estimated_to_take_no_time() -> None:
    costs = CostModel(64, 0.0, 0.0)
    for _ in range(50):
        costs.observe_step(8, 4, 0.0)
    assert costs.step_seconds(0, 1) > 0
    assert costs.step_seconds(0, 0) > 0


def test_estimates_are_never_negative() -> None:
    costs, rng = model(), random.Random(8)
    for _ in range(500):
        costs.observe_step(rng.choice([0, 1, 500]), rng.randint(0, 3), rng.choice([0.0, 1e-9, 1.0]))
        assert costs.step_seconds(1, 1) >= 0
        assert costs.recompute_seconds(10) > 0


def test_equal_steps_are_learned_and_spoil_nothing() -> None:
    model = CostModel(1, 1.0, 2000.0)
    for _ in range(20_000):
        model.observe_step(500, 12, 0.1)
    assert model.step_seconds(500, 12) == pytest.approx(0.1, rel=0.01)
    for _ in range(200):
        model.observe_step(0, 12, 0.01)
    assert model.step_seconds(0, 12) == pytest.approx(0.01, rel=0.05)


def test_attention_is_learned_and_a_token_behind_many_costs_more() -> None:
    costs, rng = model(), random.Random(9)
    for _ in range(600):
        num_tokens, num_before = rng.choice([4, 16, 64]), rng.randint(0, 6000)
        pairs = count_pairs(num_before, num_tokens)
        seconds = 12e-3 + 450e-6 * num_tokens + 0.3e-6 * pairs
        costs.observe_step(num_tokens, 8, seconds * rng.uniform(0.95, 1.05), pairs)
    assert costs.recompute_seconds(16, 6000) == pytest.approx(16 * (450e-6 + 6008 * 0.3e-6), rel=0.1)
    assert costs.recompute_seconds(16, 6000) > 3 * costs.recompute_seconds(16)


@pytest.mark.parametrize("num_before", [0, 100, 6000])
def test_tokens_within_a_time_fill_it(num_before: int) -> None:
    costs, rng = model(), random.Random(10)
    for _ in range(300):
        num_tokens, before = rng.choice([16, 64]), rng.randint(0, 6000)
        pairs = count_pairs(before, num_tokens)
        costs.observe_step(num_tokens, 8, 12e-3 + 450e-6 * num_tokens + 0.3e-6 * pairs, pairs)
    count = costs.prefill_within(0.05, num_before)
    assert costs.recompute_seconds(count, num_before) <= 0.05 < costs.recompute_seconds(count + 1, num_before)
    assert costs.prefill_within(0.0, num_before) == 0
