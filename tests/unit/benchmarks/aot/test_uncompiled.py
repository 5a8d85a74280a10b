"""A kernel that no case launches is named."""

from pathlib import Path

import pytest

from benchmarks.aot.compiling import kernels_of_tree, uncompiled
from benchmarks.aot.table import OLDER_TABLES, TABLE
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
