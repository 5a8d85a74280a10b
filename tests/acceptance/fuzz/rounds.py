"""Rounds of generated requests, several at a time, and what was wrong with their answers."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Protocol, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from svc_common.errors import Reason

REQUESTS_PER_ROUND = 50
_SHOWN = 3  # requests of a finding

INTERNAL_ERROR = re.compile(r"internal error [0-9a-f]{32}")
"""The message of an error with an id that is in the log."""

NEVER = frozenset(
    {
        *(Reason.INTERNAL, Reason.REQUEST_QUARANTINED, Reason.REQUEST_LOST, Reason.STORE_DEGRADED, Reason.NOT_LEADER),
        *(Reason.PROTOCOL_UNSUPPORTED, Reason.PERMISSION_DENIED, Reason.UNAUTHENTICATED, Reason.DRAINING),
        *(Reason.MODEL_NOT_READY, Reason.TENANT_QUOTA_EXCEEDED),
    }
)
"""Reasons that no request has where all processes run and no keys are required."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
PrintLine = Callable[[str], None]


class Send(Protocol[T_contra]):
    """Sends an example of a round, and judges the answer."""

    def __call__(self, example: T_contra, /, seed: int) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How many seconds each protocol takes, the seed of the first round, and how many requests are sent at once.

    With `is_single` only the first round runs, whatever it takes.
    """

    seconds: float
    seed: int
    at_once: int = 4
    is_single: bool = False


@dataclass
class Findings:
    """What was wrong, and how many answers had which status. Threads may share it."""

    print_line: PrintLine
    problems: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, status: str) -> None:
        """Counts an answer."""
        with self._lock:
            self.statuses[status] += 1

    def add(self, problem: str, seed: int, request: str) -> None:
        """Counts a problem by its first line, and prints the first requests that have it."""
        name = problem.partition("\n")[0]
        with self._lock:
            self.problems[name] += 1
            if self.problems[name] <= _SHOWN:
                self.print_line(f"FOUND with seed {seed}: {problem}\n  {request}")


def run_rounds(name: str, plan: Plan, strategy: SearchStrategy[T], send: Send[T], print_line: PrintLine) -> None:
    """Runs rounds until the seconds of the plan are over. `send` gets an example and the seed of its round.

    Threads send requests, as many at once as the plan says. One thread makes them: hypothesis uses ast, which fails in
    several threads at a time (CPython 3.11). Raises what `send` raises.
    """
    end = float("inf") if plan.is_single else monotonic() + plan.seconds
    places = threading.Semaphore(plan.at_once)

    with ThreadPoolExecutor(plan.at_once) as threads:
        for seed in count(plan.seed):
            sent: list[Future[None]] = []

            def submit(example: T, sent: list[Future[None]] = sent, seed: int = seed) -> None:
                places.acquire()
                sent.append(threads.submit(send, example, seed=seed))
                sent[-1].add_done_callback(lambda _: places.release())

            run_round(seed, strategy, submit, end)
            for one in sent:
                one.result()
            print_line(f"{name}: sent the requests of seed {seed}")
            if plan.is_single or monotonic() >= end:
                return


def run_round(seed: int, strategy: SearchStrategy[T], send: Callable[[T], None], end: float) -> None:
    """Sends the examples of a seed, none of them after the end. A seed always has the same examples."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=REQUESTS_PER_ROUND,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def examples(example: T) -> None:
        if monotonic() < end:
            send(example)

    examples()
