"""Result files are replaced atomically, and read back unchanged."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import DIRTY, code_hash, commit, provenance, read_result, write_result


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


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file of code, and the functions that work in it."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text("a = 1\n")
    _git(tmp_path, "init", "--quiet")
    _commit_all(tmp_path)
    return tmp_path


def _git(directory: Path, *args: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *args], cwd=directory, check=True)


def _commit_all(directory: Path) -> None:
    _git(directory, "add", "--all")
    _git(directory, "commit", "--quiet", "--message", "change")


def _is_dirty() -> bool:
    head = commit()
    assert head is not None
    assert (code_hash() is None) == head.endswith(DIRTY)
    return head.endswith(DIRTY)


def test_a_commit_is_marked_where_code_differs_from_it_or_is_not_in_it(repository: Path) -> None:
    assert not _is_dirty()
    (repository / "new.py").write_text("b = 2\n")
    assert _is_dirty()
    _commit_all(repository)
    assert not _is_dirty()
    (repository / "code.py").write_text("a = 2\n")
    assert _is_dirty()


def test_results_and_pages_change_no_hash_and_their_files_in_docs_no_mark(repository: Path) -> None:
    before = code_hash()
    for name in ("benchmarks/results/new.json", "docs/page.md", "tests/test_new.py", "ARCHITECTURE.md"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("text\n")
        if not name.startswith(("benchmarks", "docs")):
            _commit_all(repository)
        assert not _is_dirty()
        assert code_hash() == before
    (repository / "code.py").write_text("a = 3\n")
    _commit_all(repository)
    assert code_hash() != before
