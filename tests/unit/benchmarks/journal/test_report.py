"""The cost of the journal, from arrival times of tokens."""

import pytest

from benchmarks.journal.report import (
    OFF,
    ON,
    SLOW,
    JournalMemory,
    JournalRun,
    journal_section,
    judge,
    summarize,
)
from benchmarks.steps.report import WARM_UP_STEPS


def run(gap: float, durable: tuple[float, ...] = ()) -> JournalRun:
    return JournalRun.of([i * gap for i in range(WARM_UP_STEPS + 11)], durable)


def test_the_first_steps_do_not_count() -> None:
    assert len(run(0.01).gaps) == 10
    slow_start = [-5.0, -4.0, *(i * 0.01 for i in range(2, WARM_UP_STEPS + 11))]
    assert max(JournalRun.of(slow_start, ()).gaps) == pytest.approx(0.01)


def test_modes_are_compared_by_their_p99() -> None:
    runs = {ON: [run(0.011, (0.002, 0.004))], OFF: [run(0.010)], SLOW: [run(0.014, (0.6,))]}
    result = summarize(runs, JournalMemory(num_bytes=1_000_000, num_tokens=100_000))
    assert result["modes"][OFF]["durable_ms"] is None
    assert result["modes"][ON]["durable_ms"]["p50"] == pytest.approx(3.0)
    apart, slow, memory = judge(result)
    assert apart["value"] == pytest.approx(1.0)
    assert apart["holds"]
    assert not slow["holds"]
    assert memory["value"] == pytest.approx(10_000)
    assert memory["holds"]
    head = {"date": "2026-11-20", "commit": None, "machine": {"cores": 2, "processor": "a processor"}}
    sizes = {"num_sequences": 64, "forward_ms": 10.0, "num_steps": 10, "num_runs": 1}
    section = journal_section({**head, **sizes, **result, "targets": judge(result)})
    assert "| no journal | 10.00 | 10.00 | – | – |" in section
    assert "**the same while Redis takes half a second, ms: 4, target ≤ 2: missed**" in section
