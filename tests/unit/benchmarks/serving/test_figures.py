"""Medians and ratios, and which side of a bound is the right one."""

from dataclasses import replace

import pytest

from benchmarks.serving.figures import TARGETS, Figures, RatioSense, RatioTarget, judge

ONE = Figures(100.0, 0.2, 0.5, 0.02, 0.05, 10.0)


def test_a_median_is_of_each_figure_by_itself() -> None:
    runs = [ONE, replace(ONE, output_tokens_per_second=90.0, inter_token_p99=0.07), replace(ONE, wall_seconds=30.0)]
    assert Figures.median(runs) == ONE


@pytest.mark.parametrize(
    ("sense", "ratio", "holds"),
    [
        (RatioSense.AT_LEAST, 1.5, True),
        (RatioSense.AT_LEAST, 1.49, False),
        (RatioSense.AT_MOST, 1.5, True),
        (RatioSense.AT_MOST, 1.51, False),
        (RatioSense.BELOW, 1.49, True),
        (RatioSense.BELOW, 1.5, False),
    ],
)
def test_a_ratio_is_held_against_its_bound(sense: RatioSense, ratio: float, holds: bool) -> None:
    assert RatioTarget("mix-8", "output_tokens_per_second", "vllm", sense, 1.5).holds(ratio) is holds


def test_ratios_are_ours_by_theirs_under_the_same_load() -> None:
    ours = replace(ONE, output_tokens_per_second=150.0, time_to_first_token_p50=0.18)
    verdicts = {
        (v["load"], v["figure"]): v for v in judge({"quire": {"mix-8": ours, "mix-1": ONE}, "vllm": {"mix-8": ONE}})
    }
    assert {load for load, _ in verdicts} == {"mix-8"}
    assert verdicts["mix-8", "output_tokens_per_second"]["ratio"] == pytest.approx(1.5)
    assert verdicts["mix-8", "output_tokens_per_second"]["holds"]
    assert verdicts["mix-8", "time_to_first_token_p50"]["ratio"] == pytest.approx(0.9)
    assert not verdicts["mix-8", "time_to_first_token_p50"]["holds"]


def test_every_target_names_a_figure() -> None:
    assert all(hasattr(ONE, target.figure) for target in TARGETS)
