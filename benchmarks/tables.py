"""Rows of cells as a Markdown table, and as one for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cells:
    """A table: its columns' names and its rows. The first `num_labels` columns are words, the others figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1

    def markdown(self) -> str:
        """As Markdown, without a line end behind it."""
        rule = ["---" if place < self.num_labels else "---:" for place in range(len(self.columns))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))

    def print(self, title: str) -> None:
        """To the terminal."""
        # Where only what a GPU needs is installed, there is Markdown.
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="left" if place < self.num_labels else "right")
        for row in self.rows:
            table.add_row(*row)
        Console(width=150).print(table)
