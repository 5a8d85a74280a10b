"""From when tokens came to how long streams stood still, and what is asked of that."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.serving.figures import RatioSense
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
    """Whether the worst stream's longest wait of each case is below its bound, in seconds."""
    return [
        {
            "what": f"{cases[name]['title']}: worst stream at most, s",
            "value": cases[name]["worst_max"],
            "bound": bound,
            "sense": RatioSense.BELOW.value,
            "holds": cases[name]["worst_max"] < bound,
        }
        for name, bound in bounds.items()
        if name in cases
    ]
