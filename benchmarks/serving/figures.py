"""What a system came to under a load, and what is asked of Quire beside the others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import median
from typing import Any

from quire_client.bench.latency import BenchSummary


@dataclass(frozen=True)
class Figures:
    """What one run, or the median of several, came to: seconds, and tokens per second."""

    output_tokens_per_second: float
    time_to_first_token_p50: float
    time_to_first_token_p99: float
    inter_token_p50: float
    inter_token_p99: float
    wall_seconds: float

    @classmethod
    def of(cls, summary: BenchSummary) -> "Figures":
        """From a summary with streams of two tokens or more."""
        first, between = summary.time_to_first_token, summary.inter_token
        if between is None:
            raise ValueError("no stream has two tokens that came one after the other")
        return cls(
            output_tokens_per_second=summary.output_tokens_per_second,
            time_to_first_token_p50=first.p50,
            time_to_first_token_p99=first.p99,
            inter_token_p50=between.p50,
            inter_token_p99=between.p99,
            wall_seconds=summary.wall_seconds,
        )

    @classmethod
    def median(cls, runs: "Sequence[Figures]") -> "Figures":
        """Each figure's median over the runs."""
        columns = zip(*(asdict(run).values() for run in runs), strict=True)
        return cls(*(median(column) for column in columns))


class RatioSense(Enum):
    """Which side of its bound a ratio is to be on."""

    AT_LEAST = "at least"
    AT_MOST = "at most"
    BELOW = "below"


@dataclass(frozen=True)
class RatioTarget:
    """What Quire's figure is to be, divided by that of another system under the same load."""

    load: str
    figure: str
    against: str
    sense: RatioSense
    bound: float

    def holds(self, ratio: float) -> bool:
        """Whether a ratio is on the right side."""
        match self.sense:
            case RatioSense.AT_LEAST:
                return ratio >= self.bound
            case RatioSense.AT_MOST:
                return ratio <= self.bound
            case RatioSense.BELOW:
                return ratio < self.bound


def _beside_vllm(load: str, throughput: float) -> list[RatioTarget]:
    return [
        RatioTarget(load, "output_tokens_per_second", "vllm", RatioSense.AT_LEAST, throughput),
        RatioTarget(load, "time_to_first_token_p50", "vllm", RatioSense.AT_MOST, 0.8),
        RatioTarget(load, "inter_token_p99", "vllm", RatioSense.BELOW, 1.0),
    ]


TARGETS = (
    *_beside_vllm("mix-1", 1.2),
    *_beside_vllm("mix-8", 1.5),
    *_beside_vllm("mix-32", 1.5),
    RatioTarget("shared-prefix", "output_tokens_per_second", "vllm", RatioSense.AT_LEAST, 2.0),
    RatioTarget("mix-48", "output_tokens_per_second", "static_batches", RatioSense.AT_LEAST, 8.0),
)


def judge(medians: Mapping[str, Mapping[str, Figures]]) -> list[dict[str, Any]]:
    """How Quire stands to each target whose figures are there, by system and load."""
    verdicts = []
    for target in TARGETS:
        ours = medians.get("quire", {}).get(target.load)
        theirs = medians.get(target.against, {}).get(target.load)
        if ours is None or theirs is None:
            continue
        ratio = getattr(ours, target.figure) / getattr(theirs, target.figure)
        asked = asdict(target) | {"sense": target.sense.value}
        verdicts.append(asked | {"ratio": ratio, "holds": target.holds(ratio)})
    return verdicts
