"""CPUs are limited by the cgroup."""

import os
from pathlib import Path

import pytest

from worker_svc.host import available_cpus, expands_bfloat16, has_bfloat16, multiplies_bytes


def _write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000"}, 6),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 6),
        ({"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3),
    ],
)
def test_available_cpus(
    files: dict[str, object], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert available_cpus(_write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags : fpu avx512f avx512_bf16", True),
        ("flags : fpu amx_bf16", True),
        ("flags : fpu avx512f avx512_bf16x", False),
        ("Features : fp asimd bf16", True),
        ("processor : 0", False),
    ],
)
def test_bfloat16_is_what_the_processor_says(text: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"model : bf16\n{text}\n")
    assert has_bfloat16(path) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx2 fma", True), ("avx2", False), ("fma avx512f avx2", False), ("avx2x fma", False)],
)
def test_bfloat16_is_expanded_with_avx2_alone(flags: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert not expands_bfloat16(path)
    path.write_text(f"model : fma\nflags : {flags}\n")
    assert expands_bfloat16(path) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("avx2 avx_vnni", True), ("avx512f avx512_vnni", True), ("avx512f avx512bw", False), ("avx_vnni_int8", False)],
)
def test_bytes_are_multiplied_faster_with_vnni(flags: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert not multiplies_bytes(path)
    path.write_text(f"flags : fpu {flags}\n")
    assert multiplies_bytes(path) is expected
