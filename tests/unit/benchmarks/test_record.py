"""Result files are replaced atomically and read back unchanged. They name the commit and the code they are of."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import provenance, read_result, write_result

FILES = ("gateway_svc/a.py", "benchmarks/results/a.json", "docs/a.md", "tests/a.py", "ARCHITECTURE.md")


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_result(path, {"a": 1})
    write_result(path, {"a": [1.5, None]})
    assert read_result(path) == {"a": [1.5, None]}
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_where_nothing_was_written_there_is_no_result(tmp_path: Path) -> None:
    assert read_result(tmp_path / "absent.json") is None


def test_a_package_that_is_not_installed_is_left_out() -> None:
    head = provenance("grpcio", "no-such-package")
    assert head["machine"]["cores"] >= 1
    assert "grpcio" in head["machine"]
    assert "no-such-package" not in head["machine"]


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


def commit_file(folder: Path, changed: str, text: str) -> None:
    path = folder / changed
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-m", "a")


@pytest.mark.parametrize("changed", FILES)
def test_the_hash_is_of_the_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    git(tmp_path, "init")
    for file in FILES:
        commit_file(tmp_path, file, "before")
    before = record.code_hash()

    commit_file(tmp_path, changed, "after")

    assert before is not None
    assert (record.code_hash() == before) == (not changed.startswith("gateway_svc"))


def test_what_measurements_write_leaves_the_commit_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    git(tmp_path, "init")
    for file in FILES:
        commit_file(tmp_path, file, "before")
    before = (record.commit(), record.code_hash())

    for file in ("benchmarks/results/a.json", "docs/a.md"):
        (tmp_path / file).write_text("measured")

    assert (record.commit(), record.code_hash()) == before
    (tmp_path / "tests" / "a.py").write_text("after")
    assert (record.commit() or "").endswith(record.DIRTY)


def test_files_that_differ_from_the_commit_have_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.code_hash() is None  # no repository
    git(tmp_path, "init")
    commit_file(tmp_path, "a.py", "before")

    (tmp_path / "a.py").write_text("after")

    assert record.code_hash() is None


def test_a_file_that_is_not_in_the_commit_marks_it_but_for_results_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    git(tmp_path, "init")
    commit_file(tmp_path, "a.py", "before")
    before = (record.commit(), record.code_hash())
    assert not (before[0] or record.DIRTY).endswith(record.DIRTY)
    assert None not in before

    for file in ("benchmarks/results/new.json", "docs/page.md"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("measured")
        assert (record.commit(), record.code_hash()) == before
    (tmp_path / "new.py").write_text("b = 2")
    assert record.commit() == f"{before[0]}{record.DIRTY}"
    assert record.code_hash() is None
    commit_file(tmp_path, "new.py", "b = 2")
    assert not (record.commit() or "").endswith(record.DIRTY)
    (tmp_path / "a.py").write_text("after")
    assert (record.commit() or "").endswith(record.DIRTY)
