"""Regimes and the long prompt as tables, from the result that was written."""

from typing import Any

from benchmarks.pressure.figures import AUTO, RECOMPUTE, SWAP
from benchmarks.result_text import mark_missed, origin
from benchmarks.serving.figures import RatioSense
from benchmarks.tables import Cells

_SIGNS = {RatioSense.AT_LEAST: "≥", RatioSense.AT_MOST: "≤", RatioSense.BELOW: "<"}
_MEGA = 1e6


def choice_table(result: dict[str, Any]) -> Cells:
    """A row for each regime: seconds by mode, and what was chosen in a run, least to most."""
    rows = []
    for regime in result["regimes"].values():
        modes = regime["modes"]
        seconds = [f"{modes[mode]['median_seconds']:.2f}" for mode in (AUTO, SWAP, RECOMPUTE)]
        chosen = [_range([run[kind] for run in modes[AUTO]["runs"]]) for kind in ("swaps", "recomputes")]
        of_all = f"{regime['num_blocks']} of {regime['num_blocks_at_once']}"
        rows.append([regime["title"], of_all, *seconds, f"{regime['behind_the_better']:.2f}", *chosen])
    columns = ("", "blocks", "by cost, s", "swap, s", "recompute, s", "by the better", "swaps", "recomputes")
    return Cells(columns, rows)


def moved_table(result: dict[str, Any]) -> Cells:
    """A row for each regime: what a swap moves, beside what the scheduler takes a block to cost."""
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


def target_lines(result: dict[str, Any]) -> list[str]:
    """What was asked, and whether it holds; Markdown."""
    lines = []
    for target in result["targets"]:
        text = (
            f"{target['what']}: {target['value']:.4g}, asked {_SIGNS[RatioSense(target['sense'])]} {target['bound']:g}"
        )
        lines.append(mark_missed(text, holds=target["holds"]))
    return lines


def pressure_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of it."""
    targets = "\n".join(f"- {line}" for line in target_lines(result))
    return (
        f"{result['model']}, bfloat16, medians of {result['num_runs']}; {origin(result)}.\n\n"
        f"{choice_table(result).markdown()}\n\n{moved_table(result).markdown()}\n\n"
        f"{result['num_streams']} streams, and a prompt of {result['prompt_tokens']:,} tokens:\n\n"
        f"{long_prompt_table(result).markdown()}\n\n{targets}"
    )


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}–{high}"
