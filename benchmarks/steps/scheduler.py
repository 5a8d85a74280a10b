"""The scheduler's own program, with the time of each step's parts written down.

    QUIRE_…=… python -m benchmarks.steps.scheduler --times FILE [--without-journal]

At SIGTERM it writes the times, in seconds; clock times are of the machine's monotonic clock. Without the journal it
records requests and none of their tokens.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from benchmarks.steps.figures import SchedulerTimes
from scheduler_svc import __main__ as program
from scheduler_svc import journal, leader
from scheduler_svc.core.plan import Event, StepOutcome, StepPlan
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.request_log import RequestLog


class TimedScheduler(Scheduler):
    """The core, which tells how long its last call took."""

    seconds = 0.0

    def schedule(self, replica: Replica, now: float) -> StepPlan | None:
        began = perf_counter()
        try:
            return super().schedule(replica, now)
        finally:
            self.seconds = perf_counter() - began

    def commit(self, replica: Replica, outcome: StepOutcome, now: float) -> list[Event]:
        began = perf_counter()
        try:
            return super().commit(replica, outcome, now)
        finally:
            self.seconds = perf_counter() - began


class TimedEngine(SchedulerEngine):
    """The engine, which writes down when each step was planned and answered, and how long both took."""

    times: ClassVar[dict[int, SchedulerTimes]] = {}
    """Of the one that there is."""

    @property
    def _core_seconds(self) -> float:
        assert isinstance(self.core, TimedScheduler)
        return self.core.seconds

    def schedule(self, replica: Replica) -> StepPlan | None:
        plan = super().schedule(replica)
        if plan is not None:
            self.times[plan.step_id] = SchedulerTimes(
                plan.step_id, len(plan.scheduled), plan.num_tokens, self._core_seconds, perf_counter()
            )
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        times = self.times[replica.in_flight[0].step_id]
        times.answered = perf_counter()
        super().commit(replica, outcome)
        times.commit = self._core_seconds
        times.send = perf_counter() - times.answered - times.commit


class Seconds:
    """Stands for the journal's histogram, and keeps each value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, seconds: float) -> None:
        """One call of the store is over, so long after the commit of the oldest step in it."""
        self.values.append(seconds)


def note_nothing(_journal: journal.Journal, _request: RequestLog) -> None:
    """Nothing is news to a journal that is not kept."""


def replace_parts(seconds: Seconds, *, without_journal: bool) -> None:
    """Gives the program parts that tell of their times."""
    replaced: list[tuple[Any, str, Any]] = [
        (leader, "Scheduler", TimedScheduler),
        (leader, "SchedulerEngine", TimedEngine),
        (journal, "SECONDS", seconds),
    ]
    if without_journal:
        replaced.append((journal.Journal, "note", note_nothing))
    for owner, name, part in replaced:
        setattr(owner, name, part)


def main() -> None:
    """Reads flags, serves, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True, help="file to write")
    parser.add_argument("--without-journal", action="store_true")
    options = parser.parse_args()
    sys.argv[1:] = []  # the program reads its settings from the environment
    seconds = Seconds()
    replace_parts(seconds, without_journal=options.without_journal)
    program.main()
    steps = [asdict(step) for step in TimedEngine.times.values()]
    options.times.write_text(json.dumps({"steps": steps, "durable": seconds.values}))


if __name__ == "__main__":
    main()
