"""Result files are replaced atomically, and read back unchanged."""

from pathlib import Path

from benchmarks.record import provenance, read_result, write_result


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
