"""The supervisor's output, on a terminal and elsewhere."""

import errno
import io
import json

import pytest

from svc_common.supervisor.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The visible lines, without those that were cleared."""
        return [line.rsplit("\x1b[K", 1)[-1] for line in self.getvalue().split("\n")]


class GoneTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("svc_common.supervisor.console.monotonic", lambda: now[0])
    return now


def test_a_log_entry_is_shown_for_people() -> None:
    out = io.StringIO()
    entry = {"ts": "2026-01-02T03:04:05+00:00", "level": "warning", "event": "slow", "role": "worker", "ms": 7}
    Console(out).relay("worker-1", json.dumps(entry))
    assert out.getvalue().split(" ", 1)[1] == "worker-1  warning slow ms=7\n"


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "{}",
        "7",
        '{"event": "half',
        "[" * 50_000,
        '{"ts": "0001-01-01T00:00:00+23:59", "level": "info", "event": "long ago"}',
    ],
    ids=["text", "empty", "number", "half", "deep", "time"],
)
def test_any_other_line_is_shown_as_it_is(line: str) -> None:
    out = io.StringIO()
    Console(out).relay("worker", line)
    assert out.getvalue() == f"worker | {line}\n"


def test_a_line_that_the_locale_cannot_show_does_not_stop_those_after_it() -> None:
    data = io.BytesIO()
    console = Console(io.TextIOWrapper(data, encoding="latin-1", write_through=True))
    for line in ("an emoji: \N{GRINNING FACE}", "the next one"):
        console.relay("worker", line)
    assert data.getvalue().endswith(b"worker | the next one\n")


def test_credentials_of_urls_are_not_shown() -> None:
    out = io.StringIO()
    console = Console(out)
    console.relay("worker", "ValueError: redis://:s3cr3t@h")
    console.relay("worker", json.dumps({"ts": "2026-01-02T03:04:05+00:00", "level": "info", "event": "at redis://a@h"}))
    console.write_line("redis://:s3cr3t@h")
    assert out.getvalue().count("redis://***@h") == 3
    assert "s3cr3t" not in out.getvalue()


def test_a_terminal_that_is_gone_is_no_error(clock: list[float]) -> None:
    console = Console(GoneTerminal())
    console.write_line("hello")
    console.relay("worker", "hello")
    with console.waiting() as waiting:
        clock[0] += 3
        waiting.show("waiting for worker")


def test_what_is_quick_is_not_shown(clock: list[float]) -> None:
    out = Terminal()
    with Console(out).waiting() as waiting:
        clock[0] += 1.9
        waiting.show("waiting for worker")
    assert out.getvalue() == ""


def test_on_a_terminal_a_wait_is_one_line_that_goes_away(clock: list[float]) -> None:
    out = Terminal()
    console = Console(out)
    with console.waiting() as waiting:
        for _ in range(2):
            clock[0] += 3
            waiting.show("waiting for worker")
        assert out.screen == ["quire: waiting for worker (6 s)"]
        console.write_line("hello")
        assert out.screen == ["quire: hello", "quire: waiting for worker (6 s)"]
    assert out.screen == ["quire: hello", ""]


def test_away_from_a_terminal_a_wait_is_a_line_now_and_then(clock: list[float]) -> None:
    out = io.StringIO()
    with Console(out).waiting() as waiting:
        for _ in range(40):
            clock[0] += 0.5
            waiting.show("waiting for worker")
        waiting.show("waiting for gateway")
    assert out.getvalue().splitlines() == [
        "quire: waiting for worker (2 s)",
        "quire: waiting for worker (17 s)",
        "quire: waiting for gateway (20 s)",
    ]


def test_lines_and_the_status_line_may_go_to_different_streams(clock: list[float]) -> None:
    log, out = io.StringIO(), Terminal()
    console = Console(log, out)
    with console.waiting() as waiting:
        clock[0] += 3
        waiting.show("waiting for worker")
        console.write_line("hello")
        console.relay("worker", "hello")
        assert out.screen == ["quire: waiting for worker (3 s)"]
    assert out.screen == [""]
    assert log.getvalue() == "quire: hello\nworker | hello\n"
