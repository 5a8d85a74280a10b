"""Predictions are tables of their own, and stand beside what was measured where that exists."""

import copy
from typing import Any

from benchmarks.simulator.gpu_model.report import comparison, gpu_model_section

PREDICTED: dict[str, Any] = {
    "date": "2026-11-24T00:00:00",
    "commit": "a" * 40,
    "machine": {"processor": "a processor", "torch": "2"},
    "hardware": {"name": "A GPU", "origin": "assumed: 3 TB/s"},
    "kernels": [{"op": "paged_decode", "shape": "1 × 4096 tokens", "ms": 0.5, "of_device": 0.9}],
    "steps": [
        {"num_seqs": 8, "context": 1024, "ms": 6.0, "floor_ms": 5.0, "of_floor": 1.2, "num_launches": 9},
    ],
    "mixed": [
        {"num_decodes": 32, "chunk": 480, "in_graphs": True, "host_ms": 0.04, "ms": 8.0, "num_launches": 9},
    ],
}
MEASURED: dict[str, Any] = {
    "kernels": {
        "cases": [
            {"op": "paged_decode", "shape": "8 × 4 heads of 128, 11 × 4096 tokens", "ms": 9.0},
            {"op": "paged_decode", "shape": "8 × 4 heads of 128, 1 × 4096 tokens", "ms": 0.6},
        ]
    },
    "decode": {"cases": [{"num_seqs": 8, "ms": 7.5}], "mixed": [{"num_decodes": 32, "chunk": 480, "ms": 10.0}]},
}


def test_the_section_says_that_nothing_of_it_was_measured() -> None:
    section = gpu_model_section(PREDICTED)
    assert section.startswith("**Predicted, not measured**: A GPU")
    assert "Assumed: 3 TB/s." in section
    assert "| 8 | 1,024 | 9 | 6.00 | 5.00 | 1.20 |" in section
    assert "| 32 | 480 | a graph | 0.04 | 8.00 |" in section


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    kernels, steps, mixed = (table.markdown() for table in comparison(PREDICTED, MEASURED))
    assert "| paged_decode | 1 × 4096 tokens | 0.500 | 90% | 0.600 | 1.20 |" in kernels
    assert "| 1.20 | 7.500 | 1.25 |" in steps
    assert "| 8.00 | 10.000 | 1.25 |" in mixed


def test_what_is_missing_or_failed_is_a_dash() -> None:
    measured = copy.deepcopy(MEASURED)
    measured["decode"] = {"error": "took more than 120 s"}
    del measured["kernels"]["cases"][1]["ms"]
    assert all("| – | – |" in table.markdown() for table in comparison(PREDICTED, measured))
