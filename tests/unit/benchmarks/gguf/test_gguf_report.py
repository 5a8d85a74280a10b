"""What is judged beside llama.cpp, and the tables."""

from typing import Any

from benchmarks.gguf.report import gguf_section, targets


def system(alone: float, crowd: float, gap: float) -> dict[str, Any]:
    figures = {"time_to_first_token_p50": 0.1, "inter_token_p50": 0.01, "inter_token_p99": gap}
    return {
        "mix-1": {"median": {**figures, "output_tokens_per_second": alone}},
        "mix-16": {"median": {**figures, "output_tokens_per_second": crowd}},
    }


def file(num_bytes: float) -> dict[str, Any]:
    reading = {"bytes": num_bytes, "step_ms": 50.0, "gb_per_second": 24.0, "read_gb_per_second": 30.0}
    systems = {"quire": system(22.0, 90.0, 0.05), "llama_cpp": system(20.0, 30.0, 0.5)}
    return {"title": "a file", "quantization": "w8a8", "systems": systems, "reading": reading}


def test_ratios_are_judged_and_the_read_rate_of_large_models_alone() -> None:
    small, large = targets({"small": file(1e8)}), targets({"large": file(1e9)})
    assert [(one["value"], one["holds"]) for one in small] == [(1.1, True), (3.0, True), (0.1, True)]
    assert large[:3] == small
    assert (large[3]["value"], large[3]["holds"]) == (0.8, False)


def test_the_section_has_all_figures() -> None:
    load = {"title": "one at a time", "num_requests": 8}
    result = {
        "date": "2026-11-26T00:00:00",
        "commit": "c" * 40,
        "machine": {"cores": 2, "processor": "P"},
        "num_runs": 3,
        "loads": {"mix-1": load, "mix-16": {"title": "16 clients", "num_requests": 48}},
        "files": {"large": file(1e9)},
        "targets": targets({"large": file(1e9)}),
    }
    section = gguf_section(result)
    assert "| a file, 16 clients | output tokens/s | 90.0 | 30.0 | 3.00 |" in section
    assert "| a file, w8a8 | 1,000 | 50.00 | 24.0 | 80% of 30.0 |" in section
    assert "**a file: share of the read rate, one stream: 0.8, target ≥ 0.85: missed**" in section
