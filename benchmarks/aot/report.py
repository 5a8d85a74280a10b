"""The section of docs/performance.md on kernels that were compiled ahead of time."""

from collections import defaultdict
from typing import Any

from benchmarks.aot.compiling import TOLERANCE
from benchmarks.aot.table import OLDER_TABLES
from benchmarks.aot.targets import TARGETS, Target
from benchmarks.record import read_result
from benchmarks.report import Cells, version

# Kernels with products of matrices, in the shapes of Llama 3 8B and of Gemma 2 9B, whose heads are the largest.
_SHOWN = (
    ("prefill: Llama 3 8B, bf16", "_paged_attention_kernel"),
    ("prefill: Llama 3 8B, bf16, KV int8", "_paged_attention_kernel"),
    ("prefill: Gemma 2 9B, bf16", "_paged_attention_kernel"),
    ("decode: Llama 3 8B, bf16", "_decode_kernel"),
    ("decode: Llama 3 8B, bf16, KV int8", "_decode_kernel"),
    ("invariant product: 4096 to 6144, bf16", "_invariant_linear_kernel"),
    ("product in int8: 4096 to 6144, many rows, bf16", "_scaled_linear_kernel"),
    ("product in fp8 in groups: 4096 to 6144, many rows, bf16", "_scaled_linear_kernel"),
    ("product of weights in 4 bits, groups of 128: 4096 to 6144, many rows, bf16", "_weight_only_linear_kernel"),
)
_FIGURES = {
    "num_registers": "registers",
    "shared_bytes": "shared memory, bytes",
    "num_matrix_instructions": "tensor-core instructions",
    "num_async_copies": "asynchronous copies",
    "num_loop_instructions": "instructions of inner loops",
}


def aot_section(result: dict[str, Any]) -> str:
    """A row for each target, also by older versions of Triton, and one for each of some kernels and targets."""
    targets, rows_of = _by_target(result)
    triton = result["machine"]["triton"]
    summary = _summary(result, "")
    for older in map(read_result, OLDER_TABLES.values()):
        if older is not None:
            summary += _summary(older, f", Triton {older['machine']['triton']}")
    by_target = Cells(
        ("target", "kernels", "shared memory at most, bytes", "kernels that spill", "spills allowed"), summary
    )
    shown = [
        [case, target.name, *(f"{row[name]:,}" for name in _FIGURES)]
        for case, kernel in _SHOWN
        for target in targets
        for row in rows_of[target.name]
        if (row["case"], row["kernel"]) == (case, kernel)
    ]
    by_kernel = Cells(("kernel", "target", *_FIGURES.values()), shown, num_labels=2)
    return (
        f"Triton {triton}; {version(result)}. Not measured: read from the machine code. Spills are bytes of "
        f"a thread's registers. `make aot` fails where a kernel exceeds its target's limits, or differs from this "
        f"table by more than {TOLERANCE:.0%} of its instructions.\n\n{by_target.markdown()}\n\n{by_kernel.markdown()}"
    )


def _by_target(result: dict[str, Any]) -> tuple[list[Target], dict[str, list[dict[str, Any]]]]:
    """The targets of a table, and the rows of each."""
    rows_of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result["kernels"]:
        rows_of[row["target"]].append(row)
    return [TARGETS[name] for name in TARGETS if rows_of[name]], rows_of


def _summary(result: dict[str, Any], which: str) -> list[list[str]]:
    """A row for each target of a table; `which` follows its name."""
    targets, rows_of = _by_target(result)
    summary = []
    for target in targets:
        rows = rows_of[target.name]
        spilled = [row for row in rows if row["spill_bytes"]]
        most_spilled = max(row["spill_bytes"] for row in rows)
        summary.append(
            [
                f"{target.name}{which}",
                str(len(rows)),
                f"{max(row['shared_bytes'] for row in rows):,} of {target.shared_bytes:,}",
                f"{len(spilled)}, {most_spilled:,} B at most" if spilled else "0",
                f"{target.max_spill_bytes:,} B",
            ]
        )
    return summary
