"""Recovery times as tables, from the result that was written."""

from typing import Any

from benchmarks.recovery.cases import CASES
from benchmarks.result_text import mark_missed, origin
from benchmarks.tables import Cells


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


def target_lines(result: dict[str, Any]) -> list[str]:
    """What was asked, and whether it holds; Markdown."""
    lines = []
    for target in result["targets"]:
        text = f"{target['what']}: {target['value']:.2f}, asked < {target['bound']:g}"
        lines.append(mark_missed(text, holds=target["holds"]))
    return lines


_METHOD = (
    "Each stream has a client and a connection of its own; a process gets `kill -9` at some token of theirs, and is "
    "started again at once. Tokens that were under way then do not count: a stream goes on at the end of its longest "
    "pause."
)


def recovery_section(result: dict[str, Any]) -> str:
    """What docs/guarantees.md says of it."""
    targets = "\n".join(f"- {line}" for line in target_lines(result))
    return (
        f"{_METHOD}\n\n{result['model']}, bfloat16, {result['num_streams']} streams of {result['max_tokens']} tokens, "
        f"{result['num_runs']} faults of each kind; {origin(result)}.\n\n"
        f"{recovery_table(result).markdown()}\n\n{targets}"
    )
