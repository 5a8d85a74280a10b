"""Tables and the section of docs/performance.md, from a result as it is written."""

from dataclasses import asdict
from typing import Any

from benchmarks.pressure.figures import (
    LoadRun,
    LongPromptFigures,
    LongPromptRun,
    RegimeFigures,
    SwapRates,
    judge_long_prompt,
    judge_regimes,
)
from benchmarks.pressure.report import choice_table, long_prompt_table, moved_table, pressure_section, target_lines

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


def test_streams_are_told_with_the_prompt_and_without() -> None:
    assert [list(row) for row in long_prompt_table(RESULT).rows] == [
        ["each alone", "12.0", "15.0", "2.50"],
        ["together", "18.0", "24.0", "6.00"],
    ]


def test_a_missed_target_stands_out() -> None:
    first, *_, last = target_lines(RESULT)
    assert first == "**long: auto by the better of swap and recompute: 1.2, asked ≤ 1.1: missed**"
    assert last == "inter-token p99 of streams beside a long prompt, by alone: 1.6, asked < 2"


def test_the_section_tells_what_was_measured() -> None:
    section = pressure_section(RESULT)
    told = ("tiny", "medians of 2", "2026-01-02", "`0123456789ab`", "8 streams", "6,000 tokens", "1.2, asked ≤ 1.1")
    assert all(text in section for text in told)


def test_a_run_is_kept_whole() -> None:
    assert RESULT["regimes"]["long"]["modes"]["auto"]["runs"][1] == asdict(LoadRun(12.0, 34, 0, 1000))
