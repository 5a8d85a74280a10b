"""The predictions as a section of docs/performance.md, and beside what was measured."""

from collections.abc import Sequence
from typing import Any

from benchmarks.report import Cells, version


def gpu_model_section(result: dict[str, Any]) -> str:
    """The tables of predictions."""
    hardware = result["hardware"]
    tables = (_kernel_rows, _step_rows, _mixed_rows)
    origin = hardware["origin"]
    head = (
        f"**Predicted, not measured**: {hardware['name']}, Llama 3 8B in bfloat16; {version(result)}. "
        f"{origin[:1].upper()}{origin[1:]}. The host's time is, on one core of {result['machine']['processor']}, what "
        "Python took to lay a step out, with its tiles of queries and its plan of decodes, and to prepare the launches "
        "of a step that is enqueued kernel by kernel; for a graph, the assumed time of its replay."
    )
    from benchmarks.gpu.decode import OF_FLOOR  # it loads what a worker does

    missed = [str(row["num_seqs"]) for row in result["steps"] if row["of_floor"] > OF_FLOOR]
    note = f"A step of {' or '.join(missed)} sequences is predicted to miss its target, {OF_FLOOR} × the floor."
    return "\n\n".join([head, *(make(result, None).markdown() for make in tables), *([note] if missed else [])])


def comparison(predicted: dict[str, Any], measured: dict[str, Any]) -> list[Cells]:
    """The same tables with the result of `make gpu-check` in further columns."""
    return [make(predicted, measured) for make in (_kernel_rows, _step_rows, _mixed_rows)]


def _kernel_rows(predicted: dict[str, Any], measured: dict[str, Any] | None) -> Cells:
    cases = () if measured is None else measured.get("kernels", {}).get("cases", ())
    rows = []
    for row in predicted["kernels"]:
        found = [case for case in cases if case["op"] == row["op"] and case["shape"].endswith(f", {row['shape']}")]
        cells = [row["op"], row["shape"], f"{row['ms']:.3f}", f"{row['of_device']:.0%}"]
        rows.append(cells + _measured(measured, found, row["ms"]))
    return _cells(("kernel", "shape", "ms", "of the device's rate"), rows, measured, 2)


def _step_rows(predicted: dict[str, Any], measured: dict[str, Any] | None) -> Cells:
    cases = () if measured is None else measured.get("decode", {}).get("cases", ())
    rows = []
    for row in predicted["steps"]:
        found = [case for case in cases if case["num_seqs"] == row["num_seqs"]]
        cells = [str(row["num_seqs"]), f"{row['context']:,}", str(row["num_launches"])]
        cells += [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['of_floor']:.2f}"]
        rows.append(cells + _measured(measured, found, row["ms"]))
    columns = ("sequences", "context", "kernels", "decode step, ms", "floor, ms", "of the floor")
    return _cells(columns, rows, measured, 0)


def _mixed_rows(predicted: dict[str, Any], measured: dict[str, Any] | None) -> Cells:
    cases = () if measured is None else measured.get("decode", {}).get("mixed", ())
    rows = []
    for row in predicted["mixed"]:
        found = [case for case in cases if (case["num_decodes"], case["chunk"]) == (row["num_decodes"], row["chunk"])]
        cells = [str(row["num_decodes"]), str(row["chunk"]), "a graph" if row["in_graphs"] else "kernel by kernel"]
        cells += [f"{row['host_ms']:.2f}", f"{row['ms']:.2f}"]
        rows.append(cells + _measured(measured, found, row["ms"]))
    return _cells(("decodes", "prompt tokens", "runs as", "host, ms", "step, ms"), rows, measured, 0)


def _cells(columns: Sequence[str], rows: list[list[str]], measured: dict[str, Any] | None, num_labels: int) -> Cells:
    more = () if measured is None else ("measured, ms", "measured by predicted")
    return Cells((*columns, *more), rows, num_labels=num_labels)


def _measured(measured: dict[str, Any] | None, found: Sequence[dict[str, Any]], predicted_ms: float) -> list[str]:
    """The columns of what was measured; dashes where it was not."""
    if measured is None:
        return []
    if not found or "ms" not in found[0]:
        return ["–", "–"]
    return [f"{found[0]['ms']:.3f}", f"{found[0]['ms'] / predicted_ms:.2f}"]
