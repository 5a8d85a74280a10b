"""What steps cost, told as a table."""

from benchmarks.steps.figures import DurationPercentiles, StepFigures, judge, to_json
from benchmarks.steps.report import steps_section

SPREAD = DurationPercentiles(0.5, 1.25)


def test_a_case_is_a_row_and_a_miss_is_marked() -> None:
    case = StepFigures(
        256, 10.0, 300, SPREAD, SPREAD, SPREAD, SPREAD, DurationPercentiles(1.5, 2.0), SPREAD, 0.024, 97.0
    )
    machine = {"cores": 2, "processor": "A processor"}
    head = {"date": "2026-01-02T03:04:05+00:00", "commit": None, "machine": machine, "num_steps": 300, "num_runs": 5}
    exchanges = {
        "direct": {"round_trip": 0.2, "processor": 0.15},
        "event_engine": {"round_trip": 0.4, "processor": 0.25},
    }
    told = {**head, "exchange_bytes": 1500, "exchanges": exchanges}
    section = steps_section({**told, "cases": [to_json(case)], "targets": judge([case])})
    assert "over 300 steps, medians of 5 runs in turns;" in section
    assert "| 256 | 10 | 0.50 / 1.25 |" in section
    assert "schedule + commit, p50, ms: 0.50, asked < 1.50;" in section
    assert "**1.50, asked < 1.00: missed**" in section
    assert "2.4%, asked < 3.0%" in section
    assert "1,500 bytes there and back through gRPC alone: 0.20 ms, 0.15 ms of processor time" in section
    assert "grpcio's default, 0.40 ms, 0.25 ms of" in section
