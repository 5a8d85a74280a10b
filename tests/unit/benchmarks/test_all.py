"""`make bench-all` measures what is older than the code, and nothing else."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.all as bench_all
from benchmarks import record
from benchmarks.docs import Page, Section
from benchmarks.processor import Processor
from worker_svc import host


def section(folder: Path, name: str, command: str = "make bench-a") -> Section:
    return Section(name, folder / f"{name}.json", command, lambda result: "")


def test_only_results_of_other_code_are_outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = tuple(section(tmp_path, name) for name in ("current", "older", "absent", "gpu"))
    monkeypatch.setattr(bench_all, "PAGES", (Page(tmp_path, sections, ()),))
    record.write_result(sections[0].result, {"code": "this"})
    record.write_result(sections[1].result, {"code": "that"})

    assert [one.name for one in bench_all.outdated("this")] == ["older", "absent"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx512f", "avx512_bf16", "amx_bf16"}, Processor.AMX),
        ({"avx2", "fma", "avx512f", "avx512_bf16"}, Processor.AVX512),
        ({"avx2", "fma", "avx512f"}, Processor.OTHER),
        ({"avx2", "fma"}, Processor.AVX2),
        (set(), Processor.OTHER),
    ],
)
def test_figures_of_another_kind_of_processor_are_left(
    flags: set[str], expected: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [replace(section(tmp_path, kind.name), processor=kind) for kind in Processor]
    monkeypatch.setattr(bench_all, "PAGES", (Page(tmp_path, (section(tmp_path, "any"), *sections), ()),))
    monkeypatch.setattr(host, "cpu_flags", lambda cpuinfo=None: flags)
    assert [one.name for one in bench_all.outdated("this")] == ["any", expected.name]


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("make bench-a", None, ["make", "bench-a"]),
        ("VLLM_VENV=ENVIRONMENT make bench", "/venv", ["make", "bench"]),
        ("VLLM_VENV=ENVIRONMENT make bench", None, None),
        ("VLLM_VENV=ENVIRONMENT python -m benchmarks.a", "/venv", [sys.executable, "-m", "benchmarks.a"]),
        ("python -m benchmarks.simulator flood", None, [sys.executable, "-m", "benchmarks.simulator", "flood"]),
    ],
)
def test_the_command_of_a_section_can_be_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    environment: str | None,
    expected: list[str] | None,
) -> None:
    monkeypatch.delenv("VLLM_VENV", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_VENV", environment)
    assert bench_all.command_of(section(tmp_path, "a", command)) == expected
