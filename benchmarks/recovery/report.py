"""Recovery times: from arrival times of tokens to figures, their targets, and the section of docs/guarantees.md."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.recovery.cases import CASES
from benchmarks.report import Cells, Sense, origin, target, target_list
from quire_client.bench.latency import percentile

UNDER_WAY = 0.5
"""Seconds after a fault within which tokens from before it may still come."""


@dataclass(frozen=True)
class Recovery:
    """One fault. Seconds from it to the first further token on whichever stream, and on that which waited longest."""

    any: float
    worst: float


def recovery(streams: Sequence[Sequence[float]], fault: float) -> Recovery:
    """Of streams by when their tokens came, and the time of a fault during all of them.

    What was under way when the fault came is no further token: a stream went on at the end of its longest pause that
    reached beyond the fault and began no later than UNDER_WAY after it. Raises ValueError where a stream had no token
    before the fault, or none after it.
    """
    seconds = []
    for times in streams:
        pauses = [(after - max(before, fault), after) for before, after in pairwise(times) if after > fault]
        if not pauses or times[0] > fault:
            raise ValueError("a stream was not running at the fault")
        began = [pause for pause in pauses if pause[1] - pause[0] <= fault + UNDER_WAY]
        seconds.append(max(began)[1] - fault)
    return Recovery(min(seconds), max(seconds))


@dataclass(frozen=True)
class CaseFigures:
    """All faults of one kind, in seconds."""

    recoveries: tuple[Recovery, ...]

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        spreads = {
            f"{stream}_{name}": value
            for stream in ("any", "worst")
            for name, value in _spread([getattr(one, stream) for one in self.recoveries]).items()
        }
        return {**spreads, "recoveries": [asdict(one) for one in self.recoveries]}


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"p50": percentile(sorted(seconds), 50), "max": max(seconds)}


def judge(cases: dict[str, dict[str, Any]], bounds: dict[str, float]) -> list[dict[str, Any]]:
    """The longest wait of the worst stream of each case, in seconds, and its bound."""
    return [
        target(f"{cases[name]['title']}: worst stream at most, s", cases[name]["worst_max"], Sense.BELOW, bound)
        for name, bound in bounds.items()
        if name in cases
    ]


def recovery_table(result: dict[str, Any]) -> Cells:
    """A row for each kind of fault."""
    rows = [
        [
            case.title,
            *(f"{figures[f'{stream}_{name}']:.2f}" for stream in ("any", "worst") for name in ("p50", "max")),
        ]
        for case in CASES
        if (figures := result["cases"].get(case.name))
    ]
    return Cells(("killed", "any, p50, s", "any, max, s", "worst, p50, s", "worst, max, s"), rows)


_METHOD = (
    "Each stream has a client and a connection of its own; a process gets `kill -9` at some token of theirs, and is "
    "started again at once. Tokens that were already sent then do not count: a stream continues at the end of its "
    "longest pause."
)


def recovery_section(result: dict[str, Any]) -> str:
    """The section of docs/guarantees.md."""
    return (
        f"{_METHOD}\n\n{result['model']}, bfloat16, {result['num_streams']} streams of {result['max_tokens']} tokens, "
        f"{result['num_runs']} faults of each kind; {origin(result)}.\n\n"
        f"{recovery_table(result).markdown()}\n\n{target_list(result)}"
    )
