"""The output of a batch is continued wherever it was cut off, by one process, and for its own input only."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire_client.batch.input import BatchInput, open_input
from quire_client.batch.lines import BatchError, BatchLine, LineAnswer
from quire_client.batch.output import BatchOutput, open_output

GOOD, BAD = LineAnswer(200, "r-1", b'{"text": "x"}'), LineAnswer(400, "r-1", b'{"error": {}}')


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[BatchInput]:
    with open_input(write_input(tmp_path / "in", "abcd")) as batch:
        yield batch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out"


def write_input(path: Path, ids: str) -> str:
    lines = [{"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {"prompt": one}} for one in ids]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def requests(batch: BatchInput) -> list[BatchLine]:
    return list(batch.requests(lambda _: False))


@contextmanager
def answered(path: Path, batch: BatchInput, *numbers: int) -> Iterator[BatchOutput]:
    """An output with answers to lines."""
    with open_output(path, batch) as output:
        for number in numbers:
            output.append(requests(batch)[number - 1], GOOD)
        yield output


def test_an_output_goes_on_after_the_lines_that_it_has(path: Path, batch: BatchInput) -> None:
    with answered(path, batch, 3) as output:
        output.append(requests(batch)[0], BAD)
        run = output.run
    with answered(path, batch, 4) as output:
        assert [output.has(number) for number in (1, 2, 3, 4)] == [True, False, True, True]
        assert (output.num_answered, output.num_errors) == (3, 1)
        assert output.run == run
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["c", "a", "d"]


def test_a_last_line_that_was_cut_off_is_removed_wherever_it_was_cut(path: Path, batch: BatchInput) -> None:
    with answered(path, batch, 1, 2):
        pass
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with open_output(path, batch) as output:
            assert output.num_answered == (1 if size >= first else 0)
        assert path.read_bytes() == (whole[:first] if size >= first else b"")


def test_the_run_lasts_until_the_batch_is_complete(path: Path, batch: BatchInput) -> None:
    beside = path.with_name("out.run")
    with open_output(path, batch) as output:
        run = output.run
        assert beside.read_text().strip() == run  # before the first answer
    with open_output(path, batch) as output:
        assert output.run == run
        output.finish()
    assert not beside.exists()
    path.unlink()
    with open_output(path, batch) as output:
        assert output.run != run
        run = output.run
    path.unlink()  # another batch begins, and must not get the answers of the earlier one
    with open_output(path, batch) as output:
        assert output.run != run


@pytest.mark.parametrize("content", ["", "a b\n", "x" * 100])
def test_a_run_that_cannot_be_read_is_replaced(content: str, path: Path, batch: BatchInput) -> None:
    with open_output(path, batch):
        pass
    path.with_name("out.run").write_text(content)
    with open_output(path, batch) as output:
        assert output.run.isalnum()
        assert path.with_name("out.run").read_text().strip() == output.run


def test_one_process_at_a_time_has_an_output(path: Path, batch: BatchInput) -> None:
    with (
        open_output(path, batch),
        pytest.raises(BatchError, match="another `quire batch` is writing it"),
        open_output(path, batch),
    ):
        pass


@pytest.mark.parametrize("ids", ["abxd", "bacd", "a"])
def test_an_output_of_another_input_is_refused_and_kept(
    ids: str, path: Path, batch: BatchInput, tmp_path: Path
) -> None:
    with answered(path, batch, 1, 3):
        pass
    whole = path.read_bytes()
    with (
        open_input(write_input(tmp_path / "other", ids)) as other,
        pytest.raises(BatchError, match=r"line \d: answers no line of .*other"),
        open_output(path, other),
    ):
        pass
    assert path.read_bytes() == whole


def test_lines_may_be_added_to_the_input_and_unanswered_ones_changed(
    path: Path, batch: BatchInput, tmp_path: Path
) -> None:
    with answered(path, batch, 1, 3):
        pass
    with open_input(write_input(tmp_path / "more", "axcde")) as more, open_output(path, more) as output:
        assert [output.has(number) for number in range(1, 6)] == [True, False, True, False, False]


@pytest.mark.parametrize(
    "content",
    [
        b"precious",
        b'{"id": "batch_req_1", "custom_id": "a"}\n',
        b'{"id": 5}\n',
        b"[]\n",
        b"\x00\xff\n",
        b'{"id": "batch_req_1_zz", "custom_id": "a"}\n',
        b'{"custom_id": "a", "method": "POST"}\n{"',
        b'{"id": "batch_req_6Xk2", "custom_id": "a", "response": {"status_code": 200}, "error": null}',
        b'{"id": "batch_req_5',
        b'{"id": "batch_req_01_',
        b'{"id": "batch_req_1_0',
        b'{"id": "batch_req_1_00000000000000000000000000000000", "custom_id": "a"',
        b'{"id": "batch_req_9_',
        b'{"id": "batch_req_" }',
    ],
)
def test_a_file_that_is_no_output_is_refused_and_kept(content: bytes, path: Path, batch: BatchInput) -> None:
    path.write_bytes(content)
    with pytest.raises(BatchError, match="line 1: answers no line of"), open_output(path, batch):
        pass
    assert path.read_bytes() == content


def test_a_second_answer_to_a_line_is_refused(path: Path, batch: BatchInput) -> None:
    with answered(path, batch, 1, 1):
        pass
    with pytest.raises(BatchError, match="line 2: is a second answer to line 1"), open_output(path, batch):
        pass


def test_the_input_is_no_output(batch: BatchInput, tmp_path: Path) -> None:
    before = (tmp_path / "in").read_bytes()
    with pytest.raises(BatchError, match="is the input"), open_output(tmp_path / "in", batch):
        pass
    assert (tmp_path / "in").read_bytes() == before


def test_what_is_no_file_is_no_output(batch: BatchInput, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("pipe", "is not a file"), (".", "directory"), ("absent/out", "no such file")):
        with pytest.raises(BatchError, match=problem), open_output(tmp_path / name, batch):
            pass
    with pytest.raises(BatchError, match="is not a file"), open_output(Path("/dev/null"), batch):
        pass


def test_a_disk_that_is_full_ends_the_batch(path: Path, batch: BatchInput, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with open_output(path, batch) as output:
        monkeypatch.setattr("os.write", fail)
        with pytest.raises(BatchError, match="out: no space left on device"):
            output.append(requests(batch)[0], GOOD)


def test_after_a_failed_write_the_file_has_whole_lines_and_gets_no_more(
    path: Path, batch: BatchInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    first, second, third, _ = requests(batch)

    def fail_within_a_line(file: int, data: bytes) -> int:
        if len(data) < 30:
            raise OSError(28, "No space left on device")
        return write(file, data[:-20])

    with answered(path, batch, first.number) as output:
        whole = path.read_bytes()
        monkeypatch.setattr("os.write", fail_within_a_line)
        with pytest.raises(BatchError, match="no space left on device"):
            output.append(second, GOOD)
        assert path.read_bytes() == whole
        monkeypatch.setattr("os.write", write)
        with pytest.raises(BatchError, match="an earlier answer could not be written"):
            output.append(third, GOOD)
    assert path.read_bytes() == whole
    with open_output(path, batch) as output:
        assert output.num_answered == 1


def test_a_line_that_is_written_in_parts_is_whole(
    path: Path, batch: BatchInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with open_output(path, batch) as output:
        monkeypatch.setattr("os.write", lambda file, data: write(file, data[:7]))
        output.append(requests(batch)[0], GOOD)
    assert json.loads(path.read_text())["custom_id"] == "a"
