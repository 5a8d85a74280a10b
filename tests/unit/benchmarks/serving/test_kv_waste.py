"""The share of slots without a token, between two looks at the scheduler's counters."""

import pytest

from benchmarks.processes import BenchmarkFailed
from benchmarks.serving.kv_waste import KvUse


def test_waste_is_what_was_not_filled_since_then() -> None:
    assert KvUse(tokens=1090, slots=1100).wasted_since(KvUse(tokens=1000, slots=1000)) == pytest.approx(0.1)


def test_no_step_is_no_figure() -> None:
    with pytest.raises(BenchmarkFailed, match="no KV slots"):
        KvUse(5, 10).wasted_since(KvUse(5, 10))
