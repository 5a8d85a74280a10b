"""A kernel that no case launches is named, and so is one that the table does not have."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.aot.compiling import CompiledKernel, faults, kernels_of_tree, uncompiled
from benchmarks.aot.machine_code import Figures
from benchmarks.aot.table import OLDER_TABLES, TABLE
from benchmarks.aot.targets import TARGETS
from benchmarks.record import read_result


def test_kernels_without_a_row_are_named() -> None:
    kernels = kernels_of_tree()
    assert {"_decode_kernel", "_prompt_attention_kernel", "measure_kernel"} < kernels
    assert uncompiled(kernels - {"_decode_kernel"}) == ["_decode_kernel"]
    assert uncompiled([f"{name} 2" for name in kernels]) == []


@pytest.mark.parametrize("path", [TABLE, *OLDER_TABLES.values()], ids=lambda path: path.stem)
def test_every_kernel_has_a_row(path: Path) -> None:
    result = read_result(path)
    assert result is not None
    assert uncompiled(row["kernel"] for row in result["kernels"]) == []


def test_a_kernel_without_a_row_is_a_fault_where_all_cases_are_compiled() -> None:
    known, new = (
        CompiledKernel("sm_90", case, "kernel", False, Figures(32, 0, 0, 0, 0, 9, 0)) for case in ("decode", "new")
    )
    table = {known.key: known.row()}
    assert faults(TARGETS["sm_90"], known, table, of_all=True) == []
    assert faults(TARGETS["sm_90"], new, table, of_all=False) == []
    for rows in (table, {}):
        (fault,) = faults(TARGETS["sm_90"], new, rows, of_all=True)
        assert fault.startswith("has no row in the table")


def test_a_kernel_that_spills_more_than_its_row_is_a_fault() -> None:
    kernel = CompiledKernel("gfx942", "decode", "kernel", False, Figures(32, 8, 0, 0, 0, 9, 0))
    table = {kernel.key: kernel.row()}
    assert faults(TARGETS["gfx942"], kernel, table, of_all=True) == []
    worse = replace(kernel, figures=Figures(32, 16, 0, 0, 0, 9, 0))
    assert faults(TARGETS["gfx942"], worse, table, of_all=True) == ["spills 16 bytes of registers, not 8"]
