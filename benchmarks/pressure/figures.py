"""What runs came to, and what is asked of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.pressure.counts import CostEstimates, Counts
from benchmarks.serving.figures import RatioSense

AUTO, SWAP, RECOMPUTE = "auto", "swap", "recompute"

MAX_RATIO_TO_BEST = 1.1  # times the seconds of the better one of always to swap and always to recompute
MIN_CHOICES = 20  # of either kind, over all regimes, in every run
GAP_GROWTH = 2.0  # times the inter-token p99 without a long prompt beside


@dataclass(frozen=True)
class LoadRun:
    """A load under one mode. `seconds` are from the first request sent to the last token of all.

    `swaps` and `recomputes` count preemptions; `computed_tokens` are those of steps, of prompts and outputs, those of
    preempted sequences again.
    """

    seconds: float
    swaps: int
    recomputes: int
    computed_tokens: int


@dataclass(frozen=True)
class SwapRates:
    """What the choice rests on. Rates are of blocks as the worker moved them while always swapping, bytes per second.

    `swap_seconds` and `recompute_seconds` are what the scheduler takes a block to cost, when it chooses, by the end of
    the last run: out and back in, or its tokens computed again. Rates are None where nothing was moved.
    """

    out_bytes_per_second: float | None
    in_bytes_per_second: float | None
    swap_seconds: float
    recompute_seconds: float
    recompute_tokens_per_second: float

    @classmethod
    def of(cls, counts: Counts, believed: CostEstimates, block_bytes: int, block_size: int) -> "SwapRates":
        """From what was counted, and what is believed."""
        return cls(
            counts.blocks_out * block_bytes / counts.seconds_out if counts.seconds_out else None,
            counts.blocks_in * block_bytes / counts.seconds_in if counts.seconds_in else None,
            believed.swap_seconds,
            believed.recompute_seconds,
            block_size / believed.recompute_seconds,
        )


@dataclass(frozen=True)
class RegimeFigures:
    """A regime: its runs by mode, in the order in which they ran, and what the choice rests on."""

    runs: Mapping[str, Sequence[LoadRun]]
    moved: SwapRates

    def median_seconds(self, mode: str) -> float:
        """Of the runs of a mode."""
        return median(run.seconds for run in self.runs[mode])

    @property
    def ratio_to_best(self) -> float:
        """Seconds of the choice by cost, by those of the better one of the others; medians."""
        return self.median_seconds(AUTO) / min(self.median_seconds(SWAP), self.median_seconds(RECOMPUTE))

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        modes = {
            mode: {"median_seconds": self.median_seconds(mode), "runs": [asdict(run) for run in runs]}
            for mode, runs in self.runs.items()
        }
        return {"modes": modes, "moved": asdict(self.moved), "behind_the_better": self.ratio_to_best}


@dataclass(frozen=True)
class LongPromptRun:
    """Streams by themselves, a long prompt by itself, and both together. All in seconds.

    The inter-token latencies are over the gaps of all streams: beside the prompt from when it was sent to its first
    token, alone over as many tokens of each stream as are asked for before the prompt is sent.
    """

    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    first_token_alone: float
    first_token_beside: float

    @property
    def growth(self) -> float:
        """Of the p99, by the prompt."""
        return self.beside_p99 / self.alone_p99


@dataclass(frozen=True)
class LongPromptFigures:
    """Its runs."""

    runs: Sequence[LongPromptRun]

    @property
    def growth(self) -> float:
        """The median of the runs' growths: streams alone and beside the prompt take turns in each."""
        return median(run.growth for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        columns = zip(*(asdict(run).values() for run in self.runs), strict=True)
        return {
            "median": asdict(LongPromptRun(*(median(column) for column in columns))),
            "growth": self.growth,
            "runs": [asdict(run) | {"growth": run.growth} for run in self.runs],
        }


def judge_regimes(regimes: Mapping[str, RegimeFigures]) -> list[dict[str, Any]]:
    """How the choice by cost stands to what is asked of it."""
    verdicts = [
        _verdict(
            f"{name}: auto by the better of swap and recompute", f.ratio_to_best, RatioSense.AT_MOST, MAX_RATIO_TO_BEST
        )
        for name, f in regimes.items()
    ]
    turns = list(zip(*(figures.runs[AUTO] for figures in regimes.values()), strict=True))
    for what, counts in (
        ("swaps", [sum(run.swaps for run in turn) for turn in turns]),
        ("recomputes", [sum(run.recomputes for run in turn) for turn in turns]),
    ):
        verdicts.append(
            _verdict(
                f"{what} chosen in a run of all regimes, the fewest", min(counts), RatioSense.AT_LEAST, MIN_CHOICES
            )
        )
    return verdicts


def judge_long_prompt(figures: LongPromptFigures) -> list[dict[str, Any]]:
    """How streams beside a long prompt stand to what is asked."""
    return [
        _verdict(
            "inter-token p99 of streams beside a long prompt, by alone", figures.growth, RatioSense.BELOW, GAP_GROWTH
        )
    ]


def _verdict(what: str, value: float, sense: RatioSense, bound: float) -> dict[str, Any]:
    match sense:
        case RatioSense.AT_LEAST:
            holds = value >= bound
        case RatioSense.AT_MOST:
            holds = value <= bound
        case RatioSense.BELOW:
            holds = value < bound
    return {"what": what, "value": value, "sense": sense.value, "bound": bound, "holds": holds}
