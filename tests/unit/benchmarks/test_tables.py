"""Tables as Markdown and on the terminal."""

import pytest

from benchmarks.tables import Cells

TABLE = Cells(("name", "kind", "figure"), [("a", "x", "1.0"), ("b", "y", "2.0")], num_labels=2)


def test_figures_stand_right_in_markdown() -> None:
    lines = ("| name | kind | figure |", "| --- | --- | ---: |", "| a | x | 1.0 |", "| b | y | 2.0 |")
    assert TABLE.markdown() == "\n".join(lines)


def test_the_terminal_shows_title_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.print("A title")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("A title", "figure", "2.0"))
