"""What commands write."""

import pytest
from rich.table import Table

from quire_client.cli.output import print_table


def test_a_row_is_one_line_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = "/a/long/path" * 20
    table = Table(box=None, show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    table.add_row("[a]", path)
    table.add_row("b", "c")

    print_table(table)

    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["[a]", path], ["b", "c"]]
