"""How short memory is, and when that is reported."""

import logging
from dataclasses import dataclass, field

import pytest

from worker_svc.host_memory import HostMemory, HostMemoryReader
from worker_svc.memory_monitor import MemoryMonitor, MemoryPressure, PressureLevels
from worker_svc.memory_parts import MemoryParts

NONE, HIGH, CRITICAL = MemoryPressure
LEVELS = PressureLevels(0.9, 0.95)


@dataclass
class Shares(HostMemoryReader):
    """Of a limit of 1000 bytes; the last share is read again and again."""

    shares: list[float] = field(default_factory=lambda: [0.0])

    def read(self) -> HostMemory:
        share = self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]
        return HostMemory(round(1000 * share), 1000, "a test")


def monitor(*shares: float) -> MemoryMonitor:
    """One that measures only when it is asked to."""
    made = MemoryMonitor(Shares([0.0, *shares]), LEVELS, period=1e6)
    made.close()
    return made


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.5, 0.899, 0.9, 0.949, 0.95, 1.2], [NONE, NONE, HIGH, HIGH, CRITICAL, CRITICAL]),
        ([0.95, 0.94, 0.929, 0.89, 0.879], [CRITICAL, CRITICAL, HIGH, HIGH, NONE]),
        ([0.901, 0.899, 0.901, 0.881, 0.87, 0.899], [HIGH, HIGH, HIGH, HIGH, NONE, NONE]),
        ([0.99, 0.1], [CRITICAL, NONE]),
    ],
)
def test_a_state_ends_a_little_below_its_beginning(shares: list[float], expected: list[MemoryPressure]) -> None:
    states = [NONE]
    for share in shares:
        states.append(LEVELS.next(states[-1], share))
    assert states[1:] == expected


def test_shares_around_a_threshold_do_not_change_the_state_again_and_again() -> None:
    state, num_changes = NONE, 0
    for number in range(1000):
        after = LEVELS.next(state, 0.9 + 0.009 * (-1) ** number)
        num_changes += after is not state
        state = after
    assert num_changes == 1


def test_each_measurement_is_reported_once_while_memory_is_short_and_when_it_is_no_more() -> None:
    memory = monitor(0.5, 0.92, 0.92, 0.96, 0.5, 0.5)
    taken = []
    for _ in range(6):
        memory.measure()
        taken += [memory.take_pressure(), memory.take_pressure()]
    assert taken == [None, None, HIGH, None, HIGH, None, CRITICAL, None, NONE, None, None, None]


def test_changes_are_logged_and_say_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    memory = monitor(0.92, 0.92, 0.5)
    with caplog.at_level(logging.INFO, "quire.worker"):
        for _ in range(3):
            memory.measure()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "QUIRE_CPU_KV_BYTES" in caplog.records[0].message


def test_health_has_the_memory_and_its_parts() -> None:
    memory = monitor(0.96)
    assert set(memory.describe()) == {"pressure", "host"}
    memory.watch_parts(lambda: MemoryParts(weights=5, kv=4, swap=3, activations=2, fragmentation=1))
    memory.measure()
    assert memory.describe() == {
        "pressure": "critical",
        "host": {"used_bytes": 960, "limit_bytes": 1000, "limited_by": "a test"},
        "weights_bytes": 5,
        "kv_bytes": 4,
        "swap_bytes": 3,
        "activations_bytes": 2,
        "fragmentation_bytes": 1,
    }


def test_it_measures_by_itself_and_outlives_a_file_that_cannot_be_read() -> None:
    class Broken(Shares):
        def read(self) -> HostMemory:
            memory = super().read()
            if memory.used == 100:
                raise OSError("gone")
            return memory

    memory = MemoryMonitor(Broken([0.0, 0.1, 0.97]), LEVELS, period=0.001)
    while memory.pressure is NONE:
        pass
    memory.close()
    assert memory.pressure is CRITICAL
