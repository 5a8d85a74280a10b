"""Alternating runs, and the result that is written."""

from dataclasses import replace

import pytest

from benchmarks.serving.__main__ import ComparedSystem, measure, summarize_runs
from benchmarks.serving.loads import ServingLoad
from benchmarks.serving.measure import Outcome
from benchmarks.serving.report import Figures, comparison_table
from quire_client.bench.mix import MixRequest

LOAD = ServingLoad("mix-8", "mix", (MixRequest((1, 2), 3), MixRequest((4,), 5)), 8)
ONE = Figures(100.0, 0.2, 0.5, 0.02, 0.05, 10.0)


def compared_system(name: str, order: list[str], rates: list[float], kv_wasted: float | None) -> ComparedSystem:
    coming = iter(rates)

    def run() -> dict[str, Outcome]:
        order.append(name)
        return {"mix-8": Outcome(replace(ONE, output_tokens_per_second=next(coming)), kv_wasted)}

    return ComparedSystem(name, name.title(), run)


def test_systems_take_turns_and_medians_are_compared() -> None:
    order: list[str] = []
    compared_systems = [
        compared_system("quire", order, [300.0, 100.0, 200.0], 0.02),
        compared_system("vllm", order, [90.0, 100.0, 110.0], None),
    ]
    *_, outcomes = measure(compared_systems, 3)
    result = summarize_runs(compared_systems, [LOAD], outcomes)
    assert order == ["quire", "vllm"] * 3
    assert result["loads"]["mix-8"] == {
        "title": "mix",
        "concurrency": 8,
        "num_requests": 2,
        "prompt_tokens": 3,
        "output_tokens": 8,
    }
    ours = result["systems"]["quire"]["loads"]["mix-8"]
    assert (ours["median"]["output_tokens_per_second"], ours["kv_wasted"], len(ours["runs"])) == (200.0, 0.02, 3)
    assert result["systems"]["vllm"]["loads"]["mix-8"]["kv_wasted"] is None
    assert result["targets"][0]["ratio"] == pytest.approx(2.0)
    assert comparison_table(result).rows[0][1:4] == ["output tokens/s", "200", "100"]
