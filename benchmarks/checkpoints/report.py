"""The comparison on checkpoints of other tools: the table, the targets, and the section of docs/performance.md."""

from typing import Any

from benchmarks.report import Cells, Sense, origin, target, target_list

_MOST_PERCENT = 0.5


def targets(checkpoints: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the same numbers, no perplexity may differ from the tool's by more than the bound. With activations in 8 bits,
    which Quire rounds in groups, none may be higher by more; lower is no fault.
    """
    apart = max(100 * abs(one["quire"] / one["tool"] - 1) for one in checkpoints.values())
    judged = [target("difference from the tool's perplexity, %, the most of all", apart, Sense.AT_MOST, _MOST_PERCENT)]
    both = [one["activations_too"] for one in checkpoints.values() if "activations_too" in one]
    if both:
        above = max(100 * (one["quire"] / one["tool"] - 1) for one in both)
        what = "activations in 8 bits: perplexity above the tool's, %"
        judged.append(target(what, above, Sense.AT_MOST, _MOST_PERCENT))
    return judged


def checkpoints_table(result: dict[str, Any]) -> Cells:
    """A row for each checkpoint, and one more where activations are rounded too."""
    rows = []
    for one in result["checkpoints"].values():
        rows.append(_row(one["title"], one))
        if "activations_too" in one:
            rows.append(_row(f"{one['title']}, activations too", one | one["activations_too"]))
    columns = ("checkpoint", "written by", "computed by", "in Quire", "Quire", "the tool", "difference")
    return Cells(columns, rows, num_labels=4)


def _row(title: str, one: dict[str, Any]) -> list[str]:
    quire, tool = one["quire"], one["tool"]
    words = [title, one["written_by"], one["computed_by"], one["quantization"]]
    return [*words, f"{quire:.3f}", f"{tool:.3f}", f"{quire / tool - 1:+.2%}"]


def checkpoints_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    versions = ", ".join(f"{package} {version}" for package, version in result["packages"].items())
    head = f"{result['model']}, {result['num_tokens']:,} tokens; {versions}; {origin(result)}."
    return f"{head}\n\n{checkpoints_table(result).markdown()}\n\n{target_list(result)}"
