"""`make bench-all` measures what is older than the code, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.all as bench_all
from benchmarks import record
from benchmarks.docs import Page, Section

FILES = ("gateway_svc/a.py", "benchmarks/results/a.json", "docs/a.md", "tests/a.py")


def section(folder: Path, name: str, command: str = "make bench-a") -> Section:
    return Section(name, folder / f"{name}.json", command, lambda result: "")


def test_only_results_of_other_code_are_outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = tuple(section(tmp_path, name) for name in ("current", "older", "absent", "gpu"))
    monkeypatch.setattr(bench_all, "PAGES", (Page(tmp_path, sections, ()),))
    record.write_result(sections[0].result, {"code": "this"})
    record.write_result(sections[1].result, {"code": "that"})

    assert [one.name for one in bench_all.outdated("this")] == ["older", "absent"]


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("make bench-a", None, ["make", "bench-a"]),
        ("VLLM_VENV=ENVIRONMENT make bench", "/venv", ["make", "bench"]),
        ("VLLM_VENV=ENVIRONMENT make bench", None, None),
        ("python -m benchmarks.simulator flood", None, [sys.executable, "-m", "benchmarks.simulator", "flood"]),
    ],
)
def test_the_command_of_a_section_can_be_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    environment: str | None,
    expected: list[str] | None,
) -> None:
    monkeypatch.delenv("VLLM_VENV", raising=False)
    if environment is not None:
        monkeypatch.setenv("VLLM_VENV", environment)
    assert bench_all.command_of(section(tmp_path, "a", command)) == expected


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


def commit(folder: Path, changed: str, text: str) -> None:
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
        commit(tmp_path, file, "before")
    before = record.code_hash()

    commit(tmp_path, changed, "after")

    assert before is not None
    assert (record.code_hash() == before) == (not changed.startswith("gateway_svc"))


def test_what_measurements_write_leaves_the_commit_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    git(tmp_path, "init")
    for file in FILES:
        commit(tmp_path, file, "before")
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
    commit(tmp_path, "a.py", "before")

    (tmp_path / "a.py").write_text("after")

    assert record.code_hash() is None
