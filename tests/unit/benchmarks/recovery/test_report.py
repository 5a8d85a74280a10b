"""Recovery times of streams, their target and their table."""

import pytest

from benchmarks.recovery.report import CaseFigures, Recovery, judge, recovery, recovery_section

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
    "targets": [
        {"what": "Redis: worst stream at most, s", "value": 6.0, "sense": "below", "bound": 5.0, "holds": False}
    ],
}


def test_a_row_for_each_case_that_was_measured() -> None:
    section = recovery_section(RESULT)
    assert "| Redis, which is started again | 0.01 | 0.02 | 0.03 | 0.04 |" in section
    assert "a gateway" not in section
    assert "- **Redis: worst stream at most, s: 6, target < 5: missed**" in section


def test_a_stream_goes_on_at_the_end_of_its_longest_pause() -> None:
    stream = [0.0, 0.1, 0.2, 2.2, 2.3, 2.4]
    found = recovery([stream], 0.25)
    assert (found.any, found.worst) == pytest.approx((1.95, 1.95))


def test_tokens_that_were_under_way_do_not_count() -> None:
    stream = [0.0, 0.1, 0.2, 0.21, 0.22, 3.0, 3.1]  # two arrived after the fault but were sent before it
    assert recovery([stream], 0.205).worst == pytest.approx(2.795)


def test_a_pause_long_after_the_fault_is_not_counted() -> None:
    stream = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 9.0]
    assert recovery([stream], 0.15).worst < 0.6


def test_the_first_and_the_last_stream_count() -> None:
    streams = [[0.0, 0.1, 0.2, 0.3], [0.0, 0.1, 1.1, 1.2]]
    found = recovery(streams, 0.15)
    assert found.any < 0.2
    assert found.worst == pytest.approx(0.95)


@pytest.mark.parametrize("stream", [[0.0, 0.1], [0.3, 0.4]])
def test_a_stream_that_was_not_running_is_rejected(stream: list[float]) -> None:
    with pytest.raises(ValueError, match="was not running"):
        recovery([stream], 0.2)


def test_the_target_is_for_the_worst_stream_of_all_runs() -> None:
    figures = CaseFigures((Recovery(0.1, 1.0), Recovery(0.2, 3.0))).to_json()
    assert figures["worst_p50"] == 2.0
    cases = {"worker": {"title": "a worker", **figures}}
    (target,) = judge(cases, {"worker": 3.0, "gateway": 1.0})
    assert target["value"] == 3.0
    assert not target["holds"]
