"""Which process a fault hits."""

import pytest

from benchmarks.processes import BenchmarkFailed
from benchmarks.recovery.__main__ import busiest


def test_the_one_of_most_streams_is_hit() -> None:
    assert busiest("worker-beside", {"worker-0": 1, "worker-1": 7}) == "worker-1"


@pytest.mark.parametrize("counts", [{}, {"worker-0": 0, "worker-1": 0}])
def test_a_fault_that_would_hit_no_stream_is_no_measurement(counts: dict[str, int]) -> None:
    with pytest.raises(BenchmarkFailed, match="worker-beside: no stream"):
        busiest("worker-beside", counts)
