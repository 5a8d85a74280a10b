"""Recorded time series stay small."""

from benchmarks.simulator.driver import MemoryUsage
from benchmarks.simulator.recorder import Sample, Timeline

MEMORY = MemoryUsage(0, 0, 0, 0)


def test_samples_are_thinned_evenly_when_they_become_many() -> None:
    timeline = Timeline(gap=1.0)
    at = 0.0
    for _ in range(2_000):
        timeline.add(Sample(at, MEMORY, 0, 0))
        at += timeline.gap
    assert 256 <= len(timeline.samples) < 512
    gaps = {after.at - before.at for before, after in zip(timeline.samples, timeline.samples[1:], strict=False)}
    assert gaps == {timeline.gap}
