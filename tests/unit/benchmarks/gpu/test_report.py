"""The section of a GPU's results, with and without a failed part."""

from typing import Any

from benchmarks.gpu.report import gpu_section

TESTS = {"complete": True, "num_tests": 3, "counts": {"PASSED": 2, "SKIPPED": 1}}
CASE = {
    "num_seqs": 64,
    "context": 1024,
    "ms": 6.0,
    "floor_ms": 5.0,
    "of_floor": 1.2,
    "tokens_per_second": 10666.7,
    "idle_share": 0.02,
}


def report(**parts: Any) -> dict[str, Any]:
    checks = [{"name": "decode", "holds": True}, {"name": "prefill", "holds": False}]
    made = {
        "gpu": {"name": "A GPU"},
        "correct": {"checks": checks},
        "tests": TESTS,
        "kernels": {"error": "took more than 130 s\nlog"},
        "ops": {"error": "not begun: 520 s were over"},
    }
    mixed = [{"num_decodes": 32, "chunk": 480, "num_tokens": 512, "host_ms": 0.5, "ms": 9.25}]
    return made | {"decode": {"weight_bytes": 15e9, "cases": [CASE], "mixed": mixed}} | parts


def test_tests_and_decoding_are_reported_and_a_failed_part_is_named() -> None:
    section = gpu_section(report())
    assert "| 32 | 480 | 0.50 | 9.25 |" in section
    assert "A GPU. 1 of 2 comparisons of kernels and tokens hold. Of 3 tests: 2 passed, 1 skipped." in section
    assert "| 64 | 1,024 | 6.00 | 5.00 | 1.20 | 10,667 | 2.0% |" in section
    assert "No kernels: took more than 130 s" in section
    assert "No ops: not begun" in section
    assert "log" not in section


def test_remarks_are_said() -> None:
    assert "- Tests are of another commit." in gpu_section(report(remarks=["Tests are of another commit."]))


def test_tests_that_were_not_run_are_reported() -> None:
    section = gpu_section(report(tests={"complete": False, "error": "not collected"}))
    assert "Of 0 tests: none ran; not all ended in time." in section
