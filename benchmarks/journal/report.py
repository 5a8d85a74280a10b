"""The cost of the journal: figures of its runs, their targets, and the section of docs/guarantees.md."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.steps.report import WARM_UP_STEPS, DurationPercentiles

MAX_DIFFERENCE_MS = 2.0
"""Inter-token p99 with the journal, less that without it, in milliseconds; and the same of a slow Redis."""
MAX_BYTES = 16 * 1024
"""Of Redis for 1,000 generated tokens."""

ON, OFF, SLOW = MODES = ("on", "off", "slow")
"""With the journal, without it, and with it while Redis is slow."""
_TITLES = {OFF: "no journal", ON: "journal", SLOW: "journal, Redis takes half a second"}


@dataclass(frozen=True)
class JournalRun:
    """One run: seconds between a step's tokens and the next one's, and from commits until the store had them."""

    gaps: tuple[float, ...]
    durable: tuple[float, ...]

    @classmethod
    def of(cls, times: Sequence[float], durable: Sequence[float]) -> "JournalRun":
        """From the arrival times of each step's tokens. The first steps warm up."""
        return cls(tuple(after - before for before, after in pairwise(times[WARM_UP_STEPS:])), tuple(durable))


@dataclass(frozen=True)
class JournalMemory:
    """Bytes that Redis reports for requests that have ended."""

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
    """The result's figures and their bounds."""
    p99 = {mode: found["inter_token_ms"]["p99"] for mode, found in result["modes"].items()}
    values = (
        ("inter-token p99 with the journal, less without it, ms", p99[ON] - p99[OFF], MAX_DIFFERENCE_MS),
        ("the same while Redis takes half a second, ms", p99[SLOW] - p99[OFF], MAX_DIFFERENCE_MS),
        ("Redis for 1,000 tokens, bytes", result["memory"]["bytes_per_1000_tokens"], MAX_BYTES),
    )
    return [target(what, value, Sense.AT_MOST, bound) for what, value, bound in values]


def journal_table(result: dict[str, Any]) -> Cells:
    """A row for each mode."""
    rows = []
    for mode, title in _TITLES.items():
        found = result["modes"][mode]
        spreads = [found["inter_token_ms"], found["durable_ms"]]
        rows.append([title, *("–" if one is None else f"{one[p]:.2f}" for one in spreads for p in ("p50", "p99"))])
    columns = ("", "inter-token p50, ms", "p99, ms", "commit to durable p50, ms", "p99, ms")
    return Cells(columns, rows)


_METHOD = (
    "Sequences decode on a worker whose forward pass sleeps; scheduler, Redis, gRPC and the worker's own code are "
    "real. With the journal, without it, and with it while a proxy delays Redis, in turns. *Commit to durable* is from "
    "a step's commit until the store has its tokens, of the oldest step in each call."
)


def journal_section(result: dict[str, Any]) -> str:
    """The section of docs/guarantees.md."""
    return (
        f"{_METHOD}\n\n"
        f"{result['num_sequences']} sequences, a forward pass of {result['forward_ms']:g} ms, {result['num_steps']} "
        f"steps in each of {result['num_runs']} runs; {origin(result)}.\n\n"
        f"{journal_table(result).markdown()}\n\n{target_list(result)}"
    )
