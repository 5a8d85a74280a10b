"""Figures of pressure, their targets, tables and the section of docs/performance.md."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.pressure.report import (
    LoadRun,
    LongPromptFigures,
    LongPromptRun,
    RegimeFigures,
    SwapRates,
    choice_table,
    judge_long_prompt,
    judge_regimes,
    long_prompt_table,
    moved_table,
    pressure_section,
)
from benchmarks.report import target_lines

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


def test_the_choice_is_compared_with_the_better_mode_by_medians() -> None:
    assert regime([9.0, 11.0, 30.0], swap=20.0, recompute=10.0).ratio_to_best == pytest.approx(1.1)
    assert regime([9.0, 11.0, 30.0], swap=8.0, recompute=10.0).ratio_to_best == pytest.approx(1.375)


@pytest.mark.parametrize(("seconds", "holds"), [(11.0, True), (11.1, False)])
def test_the_choice_may_take_a_tenth_longer(seconds: float, holds: bool) -> None:
    targets = judge_regimes({"short": regime([seconds], swap=20.0, recompute=10.0)})
    assert targets[0]["holds"] is holds


def test_choices_are_counted_over_all_regimes_in_the_run_with_the_fewest() -> None:
    first, second = regime([1.0, 1.0], 1.0, 1.0, swaps=15), regime([1.0, 1.0], 1.0, 1.0, swaps=5, recomputes=19)
    swaps, recomputes = judge_regimes({"a": first, "b": second})[2:]
    assert (swaps["value"], swaps["holds"]) == (20, True)
    assert (recomputes["value"], recomputes["holds"]) == (19, False)


def test_growth_is_the_median_of_the_turns() -> None:
    figures = LongPromptFigures([long_prompt(0.02, 0.03), long_prompt(0.04, 0.08), long_prompt(0.01, 0.05)])
    assert figures.to_json()["growth"] == pytest.approx(2.0)
    assert figures.to_json()["median"]["beside_p99"] == pytest.approx(0.05)
    target = judge_long_prompt(figures)[0]
    assert not target["holds"]  # twice is not below twice


REGIME = RegimeFigures(
    {
        "auto": [LoadRun(12.0, 30, 0, 1000), LoadRun(12.0, 34, 0, 1000)],
        "swap": [LoadRun(10.0, 35, 0, 1000)] * 2,
        "recompute": [LoadRun(15.0, 0, 20, 1500)] * 2,
    },
    SwapRates(2.5e9, None, 0.0002, 0.004, 4000.0),
)
LONG = LongPromptFigures([LongPromptRun(0.012, 0.015, 0.018, 0.024, 2.5, 6.0)])
RESULT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "machine": {"processor": "A processor", "cores": 2},
    "model": "tiny",
    "num_runs": 2,
    "regimes": {"long": {"title": "long prompts", "num_blocks": 25, "num_blocks_at_once": 100, **REGIME.to_json()}},
    "num_streams": 8,
    "prompt_tokens": 6000,
    "long_prompt": LONG.to_json(),
    "targets": [*judge_regimes({"long": REGIME}), *judge_long_prompt(LONG)],
}


def test_modes_stand_side_by_side_with_what_was_chosen() -> None:
    row = ["long prompts", "25 of 100", "12.00", "10.00", "15.00", "1.20", "30–34", "0"]
    assert choice_table(RESULT).rows == [row]


def test_what_was_not_moved_has_no_rate() -> None:
    assert moved_table(RESULT).rows == [["long prompts", "2,500", "–", "0.20", "4,000", "4.00"]]


def test_streams_stand_with_the_prompt_and_without() -> None:
    assert [list(row) for row in long_prompt_table(RESULT).rows] == [
        ["each alone", "12.0", "15.0", "2.50"],
        ["together", "18.0", "24.0", "6.00"],
    ]


def test_a_missed_target_stands_out() -> None:
    first, *_, last = target_lines(RESULT)
    assert first == "**long: auto, relative to the better of swap and recompute: 1.2, target ≤ 1.1: missed**"
    assert last == "inter-token p99 of streams during a long prompt, relative to streams alone: 1.6, target < 2"


def test_the_section_says_what_was_measured() -> None:
    section = pressure_section(RESULT)
    texts = ("tiny", "medians of 2", "2026-01-02", "`0123456789ab`", "8 streams", "6,000 tokens", "1.2, target ≤ 1.1")
    assert all(text in section for text in texts)


def test_a_run_is_kept_whole() -> None:
    assert RESULT["regimes"]["long"]["modes"]["auto"]["runs"][1] == asdict(LoadRun(12.0, 34, 0, 1000))
