"""What the journal costs as a table, from the result that was written."""

from typing import Any

from benchmarks.journal.figures import OFF, ON, SLOW
from benchmarks.result_text import mark_missed, origin
from benchmarks.tables import Cells

_TITLES = {OFF: "no journal", ON: "journal", SLOW: "journal, Redis takes half a second"}


def journal_table(result: dict[str, Any]) -> Cells:
    """A row for each mode."""
    rows = []
    for mode, title in _TITLES.items():
        found = result["modes"][mode]
        spreads = [found["inter_token_ms"], found["durable_ms"]]
        rows.append([title, *("–" if one is None else f"{one[p]:.2f}" for one in spreads for p in ("p50", "p99"))])
    columns = ("", "inter-token p50, ms", "p99, ms", "commit to durable p50, ms", "p99, ms")
    return Cells(columns, rows)


def target_lines(result: dict[str, Any]) -> list[str]:
    """What was asked, and whether it holds; Markdown."""
    lines = []
    for target in result["targets"]:
        text = f"{target['what']}: {target['value']:,.2f}, asked ≤ {target['bound']:,g}"
        lines.append(mark_missed(text, holds=target["holds"]))
    return lines


_METHOD = (
    "Sequences decode on a worker whose forward pass sleeps; scheduler, Redis, gRPC and the worker's own code are "
    "real. With the journal, without it, and with it while a proxy delays Redis, in turns. *Commit to durable* is from "
    "a step's commit until the store has its tokens, of the oldest step in each call."
)


def journal_section(result: dict[str, Any]) -> str:
    """What docs/guarantees.md says of it."""
    targets = "\n".join(f"- {line}" for line in target_lines(result))
    return (
        f"{_METHOD}\n\n"
        f"{result['num_sequences']} sequences, a forward pass of {result['forward_ms']:g} ms, {result['num_steps']} "
        f"steps in each of {result['num_runs']} runs; {origin(result)}.\n\n"
        f"{journal_table(result).markdown()}\n\n{targets}"
    )
