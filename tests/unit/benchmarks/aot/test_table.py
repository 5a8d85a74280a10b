"""Rows of the table of compiled kernels are replaced for what was compiled, and for nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from benchmarks.aot.compiling import CompiledKernel
from benchmarks.aot.machine_code import Figures
from benchmarks.aot.table import known_figures, read_rows, write_table


def _kernel(target: str, case: str, num_registers: int) -> CompiledKernel:
    return CompiledKernel(target, case, "kernel", False, Figures(num_registers, 0, 0, 0, 0, 0, 0))


def _rows(path: Path) -> set[tuple[str, str, int]]:
    rows = json.loads(path.read_text())["kernels"]
    return {(row["target"], row["case"], row["num_registers"]) for row in rows}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    cases = [(target, case) for target in ("sm_90", "sm_80") for case in ("decode", "sampling: 1", "sampling: 2")]
    write_table(path, [_kernel(target, case, 1) for target, case in cases], ["sm_90", "sm_80"])
    return path


def test_all_rows_of_a_target_are_replaced(table: Path) -> None:
    write_table(table, [_kernel("sm_90", "decode", 7)], ["sm_90"])
    others = {("sm_80", case, 1) for case in ("decode", "sampling: 1", "sampling: 2")}
    assert _rows(table) == {("sm_90", "decode", 7), *others}


def test_of_some_cases_the_rows_of_the_others_stay(table: Path) -> None:
    write_table(table, [_kernel("sm_90", "sampling: 2", 7)], ["sm_90"], only="sampling")
    others = {("sm_80", case, 1) for case in ("decode", "sampling: 1", "sampling: 2")}
    assert _rows(table) == {("sm_90", "decode", 1), ("sm_90", "sampling: 2", 7), *others}


def test_kernels_are_known_by_the_digests_of_their_rows(tmp_path: Path) -> None:
    kernels = [replace(_kernel("sm_90", digest, registers), digest=digest) for digest, registers in (("a", 1), ("", 2))]
    path = tmp_path / "table.json"
    write_table(path, kernels, ["sm_90"])
    assert known_figures(read_rows(path, triton.__version__)) == {"a": kernels[0].figures}
