"""What the journal costs, and what is asked of that."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.serving.figures import RatioSense
from benchmarks.steps.figures import WARM_UP_STEPS, DurationPercentiles

MAX_DIFFERENCE_MS = 2.0
"""Inter-token p99 with the journal, less that without it, in milliseconds; and the same of a slow Redis."""
MAX_BYTES = 16 * 1024
"""Of Redis for 1,000 generated tokens."""

ON, OFF, SLOW = MODES = ("on", "off", "slow")
"""With the journal, without it, and with it while Redis is slow."""


@dataclass(frozen=True)
class JournalRun:
    """One run: seconds between a step's tokens and the next one's, and from commits until the store had them."""

    gaps: tuple[float, ...]
    durable: tuple[float, ...]

    @classmethod
    def of(cls, times: Sequence[float], durable: Sequence[float]) -> "JournalRun":
        """From when the tokens of each step came. The first steps warm up."""
        return cls(tuple(after - before for before, after in pairwise(times[WARM_UP_STEPS:])), tuple(durable))


@dataclass(frozen=True)
class JournalMemory:
    """What Redis holds of requests that have ended, in bytes by its own account."""

    num_bytes: int
    num_tokens: int

    @property
    def per_thousand(self) -> float:
        """Bytes for 1,000 tokens."""
        return self.num_bytes * 1000 / self.num_tokens


def summarize(runs: dict[str, list[JournalRun]], memory: JournalMemory) -> dict[str, Any]:
    """As a result holds it, in milliseconds: over all runs of a mode together, and of each."""
    modes = {}
    for mode, found in runs.items():
        durable = [seconds for run in found for seconds in run.durable]
        modes[mode] = {
            "inter_token_ms": asdict(DurationPercentiles.of([gap for run in found for gap in run.gaps])),
            "durable_ms": asdict(DurationPercentiles.of(durable)) if durable else None,
            "runs": [asdict(DurationPercentiles.of(run.gaps)) for run in found],
        }
    return {"modes": modes, "memory": {**asdict(memory), "bytes_per_1000_tokens": memory.per_thousand}}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How the result stands to each bound."""
    p99 = {mode: found["inter_token_ms"]["p99"] for mode, found in result["modes"].items()}
    values = (
        ("inter-token p99 with the journal, less without it, ms", p99[ON] - p99[OFF], MAX_DIFFERENCE_MS),
        ("the same while Redis takes half a second, ms", p99[SLOW] - p99[OFF], MAX_DIFFERENCE_MS),
        ("Redis for 1,000 tokens, bytes", result["memory"]["bytes_per_1000_tokens"], MAX_BYTES),
    )
    return [
        {"what": what, "value": value, "bound": bound, "sense": RatioSense.AT_MOST.value, "holds": value <= bound}
        for what, value, bound in values
    ]
