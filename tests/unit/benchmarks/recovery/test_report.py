"""Tables of recovery times."""

from benchmarks.recovery.report import recovery_section

CASE = {"title": "Redis", "any_p50": 0.01, "any_max": 0.02, "worst_p50": 0.03, "worst_max": 0.04}
RESULT = {
    "model": "tiny",
    "date": "2026-11-20T00:00:00",
    "commit": "0123456789abcdef",
    "machine": {"cores": 2, "processor": "a processor"},
    "num_streams": 8,
    "max_tokens": 200,
    "num_runs": 20,
    "cases": {"redis": CASE},
    "targets": [{"what": "Redis: worst stream at most, s", "value": 6.0, "bound": 5.0, "holds": False}],
}


def test_a_row_for_each_case_that_was_measured() -> None:
    section = recovery_section(RESULT)
    assert "| Redis, which is started again | 0.01 | 0.02 | 0.03 | 0.04 |" in section
    assert "a gateway" not in section
    assert "- **Redis: worst stream at most, s: 6.00, asked < 5: missed**" in section
