"""The committed table of compiled kernels."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.aot.compiling import CompiledKernel
from benchmarks.aot.machine_code import Figures
from benchmarks.record import RESULTS, provenance, read_result

TABLE = RESULTS / "aot.json"
"""By the version of Triton that workers install."""
OLDER_TABLES = {"3.6": RESULTS / "aot_triton_3.6.json"}
"""By older versions, for sm_90."""

Rows: TypeAlias = dict[tuple[str, str, str], dict[str, Any]]


def table_of(triton_version: str) -> Path:
    """The table of a version of Triton."""
    return OLDER_TABLES.get(".".join(triton_version.split(".")[:2]), TABLE)


def read_rows(path: Path, triton_version: str) -> Rows:
    """The table's rows by target, case and kernel; none if another version of Triton compiled them."""
    result = read_result(path)
    if result is None or result["machine"].get("triton") != triton_version:
        return {}
    return {(row["target"], row["case"], row["kernel"]): row for row in result["kernels"]}


def known_figures(rows: Rows) -> dict[str, Figures]:
    """The figures of the rows by their digests, which say for which target they are."""
    names = [field.name for field in fields(Figures)]
    whole = [row for row in rows.values() if row.get("digest") and row.keys() >= set(names)]
    return {row["digest"]: Figures(**{name: row[name] for name in names}) for row in whole}


def write_table(path: Path, compiled: Iterable[CompiledKernel], targets: Sequence[str], only: str = "") -> None:
    """Replaces the rows of the targets' cases with `only` in their name; other rows stay."""
    before = read_result(path) or {"kernels": []}
    rows = [row for row in before["kernels"] if row["target"] not in targets or only not in row["case"]]
    rows += [kernel.row() for kernel in compiled]
    head = json.dumps(provenance("triton", "torch"), indent=2)
    # A line for each kernel, so that a change of one is a change of one line.
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    draft = path.with_name(f".{path.name}")
    draft.write_text(f'{head[:-2]},\n  "kernels": [\n{lines}\n  ]\n}}\n')
    draft.replace(path)
