"""Medians, and how they stand to what is asked."""

from collections.abc import Sequence

import pytest

from benchmarks.pressure.counts import CostEstimates, Counts
from benchmarks.pressure.figures import (
    LoadRun,
    LongPromptFigures,
    LongPromptRun,
    RegimeFigures,
    SwapRates,
    judge_long_prompt,
    judge_regimes,
)

MOVED = SwapRates(1e9, 2e9, 0.001, 0.004, 4000.0)


def regime(auto: Sequence[float], swap: float, recompute: float, swaps: int = 0, recomputes: int = 0) -> RegimeFigures:
    runs = {
        "auto": [LoadRun(seconds, swaps, recomputes, 1000) for seconds in auto],
        "swap": [LoadRun(swap, 9, 0, 1000)] * len(auto),
        "recompute": [LoadRun(recompute, 0, 9, 1000)] * len(auto),
    }
    return RegimeFigures(runs, MOVED)


def long_prompt(alone_p99: float, beside_p99: float) -> LongPromptRun:
    return LongPromptRun(0.01, alone_p99, 0.02, beside_p99, 2.0, 5.0)


def test_the_choice_is_held_against_the_better_one_by_medians() -> None:
    assert regime([9.0, 11.0, 30.0], swap=20.0, recompute=10.0).ratio_to_best == pytest.approx(1.1)
    assert regime([9.0, 11.0, 30.0], swap=8.0, recompute=10.0).ratio_to_best == pytest.approx(1.375)


@pytest.mark.parametrize(("seconds", "holds"), [(11.0, True), (11.1, False)])
def test_a_tenth_behind_is_what_is_asked(seconds: float, holds: bool) -> None:
    verdicts = judge_regimes({"short": regime([seconds], swap=20.0, recompute=10.0)})
    assert verdicts[0]["holds"] is holds


def test_choices_are_counted_over_all_regimes_in_the_run_with_the_fewest() -> None:
    first, second = regime([1.0, 1.0], 1.0, 1.0, swaps=15), regime([1.0, 1.0], 1.0, 1.0, swaps=5, recomputes=19)
    swaps, recomputes = judge_regimes({"a": first, "b": second})[2:]
    assert (swaps["value"], swaps["holds"]) == (20, True)
    assert (recomputes["value"], recomputes["holds"]) == (19, False)


def test_growth_is_the_median_of_the_turns() -> None:
    figures = LongPromptFigures([long_prompt(0.02, 0.03), long_prompt(0.04, 0.08), long_prompt(0.01, 0.05)])
    assert figures.to_json()["growth"] == pytest.approx(2.0)
    assert figures.to_json()["median"]["beside_p99"] == pytest.approx(0.05)
    verdict = judge_long_prompt(figures)[0]
    assert not verdict["holds"]  # twice is not below twice


def test_rates_are_of_the_time_in_which_blocks_moved() -> None:
    counts = Counts(1, 0, 10, blocks_out=10, blocks_in=0, seconds_out=0.5, seconds_in=0.0)
    moved = SwapRates.of(counts, CostEstimates(0.001, 0.004), block_bytes=1000, block_size=16)
    assert moved.out_bytes_per_second == pytest.approx(20_000)
    assert moved.in_bytes_per_second is None
    assert moved.recompute_tokens_per_second == pytest.approx(4000)
