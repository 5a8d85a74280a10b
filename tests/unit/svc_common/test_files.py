"""What is known of a file that a setting names."""

import asyncio
import itertools
import logging
import threading
from pathlib import Path

import pytest

from svc_common.files import ReloadedFile, file_version, file_version_if_any, keep_refreshed, why_unreadable


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


def read_number(path: Path, before: int | None) -> int:
    return int(path.read_text()) + (before or 0)


def test_a_changed_file_is_read_again_with_what_was_read_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    file = ReloadedFile(path, "numbers", read_number, ValueError)
    file.refresh()
    assert file.current == 1
    path.write_text("20")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            file.refresh()
    assert file.current == 21
    path.write_text("no number")
    for _ in range(2):
        file.refresh()
    assert file.current == 21
    assert [one.message for one in caplog.records] == [
        "the file of numbers was read again",
        "the changed file of numbers cannot be used; the earlier ones stay",
    ]


async def test_one_that_fails_or_takes_long_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("svc_common.files.RELOAD_SECONDS", 0.001)
    released, count = threading.Event(), itertools.count()
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def fail() -> None:
        if next(count) == 10:
            loop.call_soon_threadsafe(reached.set)
        raise RuntimeError("as an issuer may cause it")

    refreshing = asyncio.create_task(keep_refreshed(released.wait, fail))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await reached.wait()
    released.set()
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
