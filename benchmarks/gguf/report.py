"""The comparison on GGUF files: tables, targets, and the section of docs/performance.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

AT_A_TIME = 16
LOADS = ("mix-1", f"mix-{AT_A_TIME}")
_FIGURES = (
    ("output tokens/s", "output_tokens_per_second", 1, ",.1f"),
    ("time to first token p50, ms", "time_to_first_token_p50", 1e3, ",.0f"),
    ("inter-token latency p50, ms", "inter_token_p50", 1e3, ",.1f"),
    ("inter-token latency p99, ms", "inter_token_p99", 1e3, ",.1f"),
)
_LEAST_SHARES = {"w8a8": 0.85, "w4a8": 0.8}
# Of the small model, most of a step is not reading.
_LEAST_BYTES = 400e6


def targets(files: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is judged of each file."""
    return [judged for file in files.values() for judged in _targets(file)]


def _targets(file: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def ratio(load: str, figure: str) -> float:
        ours, theirs = (file["systems"][name][load]["median"][figure] for name in ("quire", "llama_cpp"))
        return float(ours / theirs)

    alone, crowd = LOADS
    what, rate = f"{file['title']}: Quire over llama.cpp", "output_tokens_per_second"
    yield target(f"{what}, one stream", ratio(alone, rate), Sense.AT_LEAST, 1.1)
    yield target(f"{what}, 16 clients", ratio(crowd, rate), Sense.AT_LEAST, 2.5)
    yield target(f"{what}, inter-token p99 of 16 clients", ratio(crowd, "inter_token_p99"), Sense.AT_MOST, 0.2)
    reading = file["reading"]
    if reading["bytes"] >= _LEAST_BYTES:
        share = reading["gb_per_second"] / reading["read_gb_per_second"]
        bound = _LEAST_SHARES[file["quantization"]]
        yield target(f"{file['title']}: share of the read rate, one stream", share, Sense.AT_LEAST, bound)


def gguf_table(result: Mapping[str, Any]) -> Cells:
    """A row for each figure of each file and load."""
    rows = []
    for file in result["files"].values():
        for load, about in result["loads"].items():
            title = f"{file['title']}, {about['title']}"
            for label, figure, scale, style in _FIGURES:
                ours, theirs = (file["systems"][name][load]["median"][figure] for name in ("quire", "llama_cpp"))
                cells = (f"{ours * scale:{style}}", f"{theirs * scale:{style}}", f"{ours / theirs:.2f}")
                rows.append([title, label, *cells])
                title = ""
    return Cells(["", "", "Quire", "llama.cpp", "ratio"], rows, num_labels=2)


def read_rates_table(result: Mapping[str, Any]) -> Cells:
    """A row for each file: what a step of one sequence reads."""
    rows = [
        [
            f"{file['title']}, {file['quantization']}",
            f"{reading['bytes'] / 1e6:,.0f}",
            f"{reading['step_ms']:.2f}",
            f"{reading['gb_per_second']:.1f}",
            f"{reading['gb_per_second'] / reading['read_gb_per_second']:.0%} of {reading['read_gb_per_second']:.1f}",
        ]
        for file in result["files"].values()
        for reading in [file["reading"]]
    ]
    return Cells(["one sequence", "weights, MB", "step, ms", "GB/s", "of the processor's GB/s"], rows)


def gguf_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    crowd = result["loads"][LOADS[1]]
    runs = "one run" if result["num_runs"] == 1 else f"medians of {result['num_runs']} runs in turns"
    alone = result["loads"][LOADS[0]]
    head = f"{alone['num_requests']} requests one after another, then {crowd['num_requests']} of {AT_A_TIME} clients"
    tables = f"{gguf_table(result).markdown()}\n\n{read_rates_table(result).markdown()}"
    return f"{head}; {runs}; {origin(result)}.\n\n{tables}\n\n{target_list(result)}"
