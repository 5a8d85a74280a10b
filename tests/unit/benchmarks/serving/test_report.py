"""The comparison and the sweep: ratios, tables and charts."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.serving.report import (
    TARGETS,
    Figures,
    comparison_table,
    judge,
    ratio_table,
    serving_section,
    sweep_charts,
    sweep_section,
)

ONE = Figures(100.0, 0.2, 0.5, 0.02, 0.05, 10.0)
TWO = replace(ONE, output_tokens_per_second=160.0)
HEAD: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "machine": {"processor": "A processor", "cores": 2, "torch": "2.0", "transformers": "5.0"},
    "model": "tiny",
}
RESULT: dict[str, Any] = {
    **HEAD,
    "vllm": "vllm 1.0",
    "num_runs": 3,
    "loads": {"mix-8": {"title": "mix, 8 at a time", "num_requests": 48}},
    "systems": {
        "quire": {"title": "Quire", "loads": {"mix-8": {"median": asdict(TWO)}}},
        "vllm": {"title": "vLLM", "loads": {"mix-8": {"median": asdict(ONE)}}},
        "static_batches": {"title": "static", "loads": {}},
    },
    "targets": judge({"quire": {"mix-8": TWO}, "vllm": {"mix-8": ONE}}),
}


def test_systems_stand_side_by_side() -> None:
    first, *_, last = comparison_table(RESULT).rows
    assert list(first) == ["mix, 8 at a time, 48 requests", "output tokens/s", "160", "100", "–"]
    assert last[1] == "inter-token latency p99, ms"


def test_ratios_stand_beside_their_targets() -> None:
    table = ratio_table(RESULT)
    assert table.columns == ["", "", "vLLM", "target"]
    assert table.rows == [
        ["mix, 8 at a time", "output tokens/s", "**1.60**", "≥ 1.9"],
        ["mix, 8 at a time", "time to first token p50", "**1.00**", "≤ 0.8"],
        ["mix, 8 at a time", "inter-token latency p99", "**1.00**", "≤ 0.5"],
    ]


def test_the_section_says_what_was_measured() -> None:
    section = serving_section(RESULT)
    assert all(text in section for text in ("tiny", "medians of 3", "2026-01-02", "`0123456789ab`", "vllm 1.0"))


def test_a_sweep_has_a_line_for_each_system() -> None:
    points = [{"concurrency": 1, **asdict(ONE)}, {"concurrency": 8, **asdict(TWO)}]
    sweep = {**HEAD, "systems": {"quire": {"title": "Quire", "points": points}}}
    throughput, first_token, inter_token = sweep_charts(sweep)
    assert throughput.series[0].points == [(1, 100.0), (8, 160.0)]
    assert first_token.series[0].points == [(1, 0.2), (8, 0.2)]
    assert inter_token.series[0].points == [(1, 20.0), (8, 20.0)]
    assert "| 8 | 160 | 200 | 20.0 |" in sweep_section(sweep)


def test_ratios_are_ours_by_theirs_under_the_same_load() -> None:
    ours = replace(ONE, output_tokens_per_second=200.0, time_to_first_token_p50=0.18)
    targets = {
        (one["load"], one["figure"]): one
        for one in judge({"quire": {"mix-8": ours, "mix-1": ONE}, "vllm": {"mix-8": ONE}})
    }
    assert {load for load, _ in targets} == {"mix-8"}
    assert targets["mix-8", "output_tokens_per_second"]["ratio"] == pytest.approx(2.0)
    assert targets["mix-8", "output_tokens_per_second"]["holds"]
    assert targets["mix-8", "time_to_first_token_p50"]["ratio"] == pytest.approx(0.9)
    assert not targets["mix-8", "time_to_first_token_p50"]["holds"]


def test_every_target_names_a_figure() -> None:
    assert all(hasattr(ONE, target.figure) for target in TARGETS)
