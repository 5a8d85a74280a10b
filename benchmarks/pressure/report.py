"""KV memory under pressure: figures of the runs, their targets, and the section of docs/performance.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list
from benchmarks.runner import median_of

_MEGA = 1e6
AUTO, SWAP, RECOMPUTE = "auto", "swap", "recompute"

MAX_RATIO_TO_BEST = 1.1  # times the seconds of the better one of always to swap and always to recompute
MIN_CHOICES = 20  # of either kind, over all regimes, in every run
GAP_GROWTH = 2.0  # times the inter-token p99 without a long prompt


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
    """What the choice by cost is based on. Rates are those of the worker while always swapping, bytes per second.

    `swap_seconds` and `recompute_seconds` are the scheduler's estimates at the end of the last run: a block out and
    back in, or its tokens computed again. Rates are None where nothing was moved.
    """

    out_bytes_per_second: float | None
    in_bytes_per_second: float | None
    swap_seconds: float
    recompute_seconds: float
    recompute_tokens_per_second: float


@dataclass(frozen=True)
class RegimeFigures:
    """A regime: its runs by mode, in their order, and what the choice by cost is based on."""

    runs: Mapping[str, Sequence[LoadRun]]
    moved: SwapRates

    def median_seconds(self, mode: str) -> float:
        return median(run.seconds for run in self.runs[mode])

    @property
    def ratio_to_best(self) -> float:
        """Median seconds of the choice by cost, divided by those of the better other mode."""
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
        """By how much the prompt multiplies the p99."""
        return self.beside_p99 / self.alone_p99


@dataclass(frozen=True)
class LongPromptFigures:
    runs: Sequence[LongPromptRun]

    @property
    def growth(self) -> float:
        """The median of the runs' growths."""
        return median(run.growth for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As a result holds it."""
        return {
            "median": asdict(median_of(self.runs)),
            "growth": self.growth,
            "runs": [asdict(run) | {"growth": run.growth} for run in self.runs],
        }


def judge_regimes(regimes: Mapping[str, RegimeFigures]) -> list[dict[str, Any]]:
    """Targets of the choice by cost."""
    targets = [
        target(
            f"{name}: auto, relative to the better of swap and recompute",
            f.ratio_to_best,
            Sense.AT_MOST,
            MAX_RATIO_TO_BEST,
        )
        for name, f in regimes.items()
    ]
    turns = list(zip(*(figures.runs[AUTO] for figures in regimes.values()), strict=True))
    for what, counts in (
        ("swaps", [sum(run.swaps for run in turn) for turn in turns]),
        ("recomputes", [sum(run.recomputes for run in turn) for turn in turns]),
    ):
        text = f"fewest {what} by cost in a run of all regimes"
        targets.append(target(text, min(counts), Sense.AT_LEAST, MIN_CHOICES))
    return targets


def judge_long_prompt(figures: LongPromptFigures) -> list[dict[str, Any]]:
    """The target of streams during a long prompt."""
    text = "inter-token p99 of streams during a long prompt, relative to streams alone"
    return [target(text, figures.growth, Sense.BELOW, GAP_GROWTH)]


def choice_table(result: dict[str, Any]) -> Cells:
    """A row for each regime: seconds by mode, and the fewest and most choices of each kind in a run."""
    rows = []
    for regime in result["regimes"].values():
        modes = regime["modes"]
        seconds = [f"{modes[mode]['median_seconds']:.2f}" for mode in (AUTO, SWAP, RECOMPUTE)]
        chosen = [_range([run[kind] for run in modes[AUTO]["runs"]]) for kind in ("swaps", "recomputes")]
        of_all = f"{regime['num_blocks']} of {regime['num_blocks_at_once']}"
        rows.append([regime["title"], of_all, *seconds, f"{regime['behind_the_better']:.2f}", *chosen])
    columns = ("", "blocks", "by cost, s", "swap, s", "recompute, s", "relative to the better", "swaps", "recomputes")
    return Cells(columns, rows)


def moved_table(result: dict[str, Any]) -> Cells:
    """A row for each regime: rates of swaps, and the scheduler's estimates of a block's costs."""
    rows = []
    for regime in result["regimes"].values():
        moved = regime["moved"]
        rates = [moved[f"{way}_bytes_per_second"] for way in ("out", "in")]
        rows.append(
            [
                regime["title"],
                *("–" if rate is None else f"{rate / _MEGA:,.0f}" for rate in rates),
                f"{moved['swap_seconds'] * 1e3:.2f}",
                f"{moved['recompute_tokens_per_second']:,.0f}",
                f"{moved['recompute_seconds'] * 1e3:.2f}",
            ]
        )
    columns = (
        *("", "moved out, MB/s", "moved in, MB/s", "a block out and in, ms", "recompute, tokens/s"),
        "a block's tokens, ms",
    )
    return Cells(columns, rows)


def long_prompt_table(result: dict[str, Any]) -> Cells:
    """A row for the streams alone, and one for them beside the prompt."""
    median = result["long_prompt"]["median"]
    rows = [
        [
            title,
            f"{median[f'{which}_p50'] * 1e3:.1f}",
            f"{median[f'{which}_p99'] * 1e3:.1f}",
            f"{median[f'first_token_{which}']:.2f}",
        ]
        for title, which in (("each alone", "alone"), ("together", "beside"))
    ]
    return Cells(("", "inter-token p50, ms", "inter-token p99, ms", "the prompt's first token, s"), rows)


def pressure_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    return (
        f"{result['model']}, bfloat16, medians of {result['num_runs']}; {origin(result)}.\n\n"
        f"{choice_table(result).markdown()}\n\n{moved_table(result).markdown()}\n\n"
        f"{result['num_streams']} streams, and a prompt of {result['prompt_tokens']:,} tokens:\n\n"
        f"{long_prompt_table(result).markdown()}\n\n{target_list(result)}"
    )


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}–{high}"
