"""The input of a batch is checked as a whole, and read again without keeping bodies."""

import io
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire_client.batch.input import BatchInput, open_input
from quire_client.batch.lines import BatchError


def line(custom_id: str, url: str = "/v1/completions", **fields: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"}, **fields}) + "\n"


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(lines))
    return str(path)


def ids(batch: BatchInput, *done: int) -> list[str]:
    return [one.custom_id for one in batch.requests(lambda number: number in done)]


def test_lines_are_read_in_their_order_without_those_that_are_done(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in", "\ufeff", line("a"), "\n", line("b", "/tokenize", extra=1), "  \n", line("c").rstrip("\n")
    )
    with open_input(path) as batch:
        assert (batch.num_requests, batch.num_lines) == (3, 5)
        assert ids(batch) == ["a", "b", "c"]
        assert ids(batch, 1, 5) == ["b"]
        assert batch.first_line_of_url == {"/v1/completions": 1, "/tokenize": 3}
        assert list(batch.ignored_fields) == ["extra"]
        assert [batch.digest(number) is None for number in range(-1, 8)] == [
            True, True, False, True, False, True, False, True, True,
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "has no requests"),
        (["\n"], "has no requests"),
        ([line("a"), "\n", "{}\n"], "line 3: custom_id: must be given"),
        ([line("a"), line("b"), line("a"), line("b")], "line 3: custom_id: 'a' is also that of line 1"),
    ],
)
def test_a_file_with_a_mistake_is_refused(lines: list[str], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in", *lines)
    with pytest.raises(BatchError) as raised, open_input(path):
        pass
    assert str(raised.value) == f"{path}: {problem}"


@pytest.mark.parametrize(("name", "why"), [("absent", "no such file or directory"), (".", "is a directory")])
def test_a_file_that_cannot_be_read_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=why), open_input(str(tmp_path / name)):
        pass


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_client.batch.input._MAX_LINE_BYTES", 2**20)
    with (
        pytest.raises(BatchError, match="line 1: has more than 1 MiB"),
        open_input(write(tmp_path / "in", "[" * 2**21)),
    ):
        pass


def test_an_input_that_changes_while_it_is_sent_ends_the_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "in", line("a"), line("b"))
    with open_input(path) as batch:
        write(tmp_path / "in", line("a"), line("c"))
        with pytest.raises(BatchError, match="line 2: has changed"):
            ids(batch)


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    writer = threading.Thread(target=path.write_text, args=(line("a") + line("b"),))
    writer.start()
    with open_input(str(path)) as batch:
        assert ids(batch) == ids(batch) == ["a", "b"]
    writer.join()


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(line("a").encode())))
    with open_input("-") as batch:
        assert batch.name == "standard input"
        assert ids(batch) == ids(batch) == ["a"]


def test_ids_are_compared_where_their_hashes_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_client.batch.input.hash", lambda _: 1, raising=False)
    with open_input(write(tmp_path / "in", line("a"), line("b"))) as batch:
        assert ids(batch) == ["a", "b"]
