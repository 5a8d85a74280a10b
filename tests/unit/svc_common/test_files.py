"""What is known of a file that a setting names."""

from pathlib import Path

import pytest

from svc_common.files import file_version, file_version_if_any, why_unreadable


def test_a_file_that_was_written_or_replaced_has_another_version(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("a")
    first = file_version(path)
    assert file_version_if_any(path) == first
    path.write_text("longer")
    assert file_version(path) != first
    other.write_text("longer")
    second = file_version(path)
    other.replace(path)
    assert file_version(path) != second


def test_a_missing_file_has_no_version_and_a_reason(tmp_path: Path) -> None:
    assert file_version_if_any(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError) as raised:
        file_version(tmp_path / "missing")
    assert why_unreadable(raised.value) == "no such file or directory"
