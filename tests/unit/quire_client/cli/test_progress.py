"""The progress of many requests where there is no terminal."""

import pytest

from quire_client.cli import progress
from quire_client.cli.progress import RequestProgress


def test_there_is_a_line_at_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with RequestProgress(40, "0 errors", 20) as shown:
        for _ in range(20):
            shown.advance()
            shown.show("1 error")
    first, *_, last = lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert first == "quire: 24 of 40 requests, 1 error"
    assert last == "quire: 40 of 40 requests, 1 error"


def test_there_is_a_line_after_a_minute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    with RequestProgress(1_000_000, "0 errors") as shown:
        for now in (1.0, 59.0, 61.0, 62.0, 130.0):  # noqa: B007
            shown.advance()
    assert capsys.readouterr().err.splitlines() == [
        "quire: 3 of 1,000,000 requests, 0 errors",
        "quire: 5 of 1,000,000 requests, 0 errors",
    ]
