"""Perplexities as a table, from the result that was written."""

from typing import Any

from benchmarks.result_text import version
from benchmarks.tables import Cells


def quality_table(result: dict[str, Any]) -> Cells:
    """A row for each format; what it adds is to the first one."""
    formats = result["formats"]
    first = next(iter(formats.values()))["perplexity"]
    rows = [
        [name, f"{about['perplexity']:.3f}", f"{about['perplexity'] / first - 1:+.2%}"]
        for name, about in formats.items()
    ]
    return Cells(("weights", "perplexity", f"beside {next(iter(formats))}"), rows)


def quality_section(result: dict[str, Any]) -> str:
    """What docs/performance.md says of quality."""
    num_tokens = next(iter(result["formats"].values()))["num_tokens"]
    return f"{result['model']}, {num_tokens:,} tokens; {version(result)}.\n\n{quality_table(result).markdown()}"
