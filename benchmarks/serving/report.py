"""The comparison and the sweep as tables and charts, from the results that were written."""

from typing import Any

from benchmarks.plot import Chart, Series
from benchmarks.result_text import mark_missed, origin
from benchmarks.serving.figures import RatioSense, RatioTarget
from benchmarks.tables import Cells

_FIGURES = (
    ("output tokens/s", "output_tokens_per_second", 1, ",.0f"),
    ("time to first token p50, ms", "time_to_first_token_p50", 1e3, ",.0f"),
    ("time to first token p99, ms", "time_to_first_token_p99", 1e3, ",.0f"),
    ("inter-token latency p50, ms", "inter_token_p50", 1e3, ",.1f"),
    ("inter-token latency p99, ms", "inter_token_p99", 1e3, ",.1f"),
)
_SIGNS = {RatioSense.AT_LEAST: "≥", RatioSense.AT_MOST: "≤", RatioSense.BELOW: "<"}


def comparison_table(result: dict[str, Any]) -> Cells:
    """A row for each figure under each load: the systems side by side, and the ratios that are asked for."""
    systems = result["systems"]
    rows = []
    for load, about in result["loads"].items():
        title = f"{about['title']}, {about['num_requests']} requests"
        for label, figure, scale, style in _FIGURES:
            medians = [system["loads"].get(load, {}).get("median") for system in systems.values()]
            cells = ["–" if median is None else format(median[figure] * scale, style) for median in medians]
            rows.append([title, label, *cells, _ratios(result, load, figure)])
            title = ""
    columns = ["", "", *(system["title"] for system in systems.values()), "Quire's ratio"]
    return Cells(columns, rows, num_labels=2)


def summary_lines(result: dict[str, Any]) -> str:
    """What was measured, when and on what."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers") if name in machine)
    peer = f", {result['vllm']}" if result.get("vllm") else ""
    wasted = result["systems"].get("quire", {}).get("loads", {}).get("mix-48", {}).get("kv_wasted")
    told = "" if wasted is None else f" Of the KV memory in use, {wasted:.1%} held no token (48 at a time)."
    runs = "one run" if result["num_runs"] == 1 else f"medians of {result['num_runs']}"
    return f"{result['model']}, bfloat16, {runs}; {origin(result)}, {versions}{peer}.{told}"


def serving_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of the comparison."""
    return f"{summary_lines(result)}\n\n{comparison_table(result).markdown()}"


def _ratios(result: dict[str, Any], load: str, figure: str) -> str:
    """Each target's ratio for this figure, and what was asked."""
    told = []
    for verdict in result["targets"]:
        if (verdict["load"], verdict["figure"]) == (load, figure):
            target = RatioTarget(load, figure, verdict["against"], RatioSense(verdict["sense"]), verdict["bound"])
            beside = result["systems"][target.against]["title"]
            asked = f"{verdict['ratio']:.2f} × {beside}, asked {_SIGNS[target.sense]} {target.bound:g}"
            told.append(mark_missed(asked, holds=verdict["holds"]))
    return "; ".join(told)


def sweep_table(result: dict[str, Any]) -> Cells:
    """A row for each concurrency: each system's throughput and time to first token."""
    systems = result["systems"].values()
    columns = ["in flight"]
    for system in systems:
        columns += [f"{system['title']}: tokens/s", "first token p50, ms", "inter-token p50, ms"]
    rows = []
    for points in zip(*(system["points"] for system in systems), strict=True):
        row = [str(points[0]["concurrency"])]
        for point in points:
            row.append(f"{point['output_tokens_per_second']:,.0f}")
            row.append(f"{point['time_to_first_token_p50'] * 1e3:,.0f}")
            row.append(f"{point['inter_token_p50'] * 1e3:,.1f}")
        rows.append(row)
    return Cells(columns, rows)


def sweep_charts(result: dict[str, Any]) -> list[Chart]:
    """Throughput, time to first token and inter-token latency over concurrency."""
    shown = (
        ("Output tokens/s", "output_tokens_per_second", 1.0),
        ("Time to first token p50, s", "time_to_first_token_p50", 1.0),
        ("Inter-token latency p50, ms", "inter_token_p50", 1e3),
    )
    return [
        Chart(
            title,
            "requests in flight",
            [
                Series(system["title"], [(point["concurrency"], point[figure] * scale) for point in system["points"]])
                for system in result["systems"].values()
            ],
        )
        for title, figure, scale in shown
    ]


def sweep_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of the sweep."""
    return (
        f"{result['model']}, bfloat16, one run; {origin(result)}.\n\n"
        f"![Output tokens per second, time to first token and inter-token latency over concurrency](sweep.svg)\n\n"
        f"{sweep_table(result).markdown()}"
    )
