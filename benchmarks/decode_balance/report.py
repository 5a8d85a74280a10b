"""The section of docs/performance.md on decodes of ragged contexts."""

from typing import Any

from benchmarks.report import Cells, target_list, version

_SHOWN_TARGET = "sm_90"
_WAYS = ("even_splits", "planned")


def decode_balance_section(result: dict[str, Any]) -> str:
    """A row for each kind of contexts."""
    table = []
    for contexts in dict.fromkeys(row["contexts"] for row in result["rows"]):
        rows = {row["target"]: row for row in result["rows"] if row["contexts"] == contexts}
        figures = [rows[_SHOWN_TARGET][way] for way in _WAYS]
        figures += [min(row[way] for row in rows.values()) for way in _WAYS]
        table.append([contexts, *(f"{figure:.0%}" for figure in figures)])
    columns = (
        "contexts",
        f"even splits on {_SHOWN_TARGET}",
        f"equal shares on {_SHOWN_TARGET}",
        "even splits, least",
        "equal shares, least",
    )
    return (
        f"{result['model']}; {version(result)}. Not measured: the share of the time in which tiles of keys are "
        "computed, by a model in which a program takes a unit of time for each tile and for each start of an item, and "
        "the merge of parts takes one. *Least* is of seven targets; how many programs run at the same time follows "
        "from registers and shared memory of the compiled kernel. *Even splits* are those of FlashAttention 2: as many "
        "for each sequence, chosen by the number of sequences and the model's context.\n\n"
        f"{Cells(columns, table).markdown()}\n\n{target_list(result)}"
    )
