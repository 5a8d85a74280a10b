"""The scheduler's own program, which also records the times of each step's parts.

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

from benchmarks.steps.report import SchedulerTimes
from scheduler_svc import __main__ as program
from scheduler_svc import journal, term
from scheduler_svc.core.events import Event
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepOutcome, StepPlan
from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.request_log import RequestLog


class TimedScheduler(Scheduler):
    """The core, which records the duration of its last call."""

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
    """The engine, which records when each step was planned and answered, and how long both took."""

    times: ClassVar[dict[int, SchedulerTimes]] = {}
    """By step id."""

    def schedule(self, replica: Replica) -> StepPlan | None:
        plan = super().schedule(replica)
        if plan is not None:
            self.times[plan.step_id] = SchedulerTimes(
                plan.step_id, len(plan.scheduled), plan.num_tokens, self._core_seconds(), perf_counter()
            )
        return plan

    def commit(self, replica: Replica, outcome: StepOutcome) -> None:
        times = self.times[replica.steps_in_flight[0].step_id]
        times.answered = perf_counter()
        super().commit(replica, outcome)
        times.commit = self._core_seconds()
        times.send = perf_counter() - times.answered - times.commit

    def _core_seconds(self) -> float:
        [model] = self.models
        assert isinstance(model.core, TimedScheduler)
        return model.core.seconds


class Seconds:
    """Replaces the journal's histogram and keeps each value."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, seconds: float) -> None:
        """Seconds from the commit of the oldest step in a call of the store to the end of that call."""
        self.values.append(seconds)


def note_nothing(_journal: journal.Journal, _request: RequestLog) -> None:
    """Replaces `Journal.mark_changed` where there is no journal."""


def replace_parts(seconds: Seconds, *, without_journal: bool) -> None:
    """Replaces parts of the program by ones that record their times."""
    replaced: list[tuple[Any, str, Any]] = [
        (term, "Scheduler", TimedScheduler),
        (term, "SchedulerEngine", TimedEngine),
        (journal, "SECONDS", seconds),
    ]
    if without_journal:
        replaced.append((journal.Journal, "mark_changed", note_nothing))
    for owner, name, part in replaced:
        getattr(owner, name)  # what is not there cannot be replaced
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
