"""Log lines for operators and log collectors."""

import asyncio
import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

from svc_common.logs import ConsoleFormatter, FewRepeats, JsonFormatter, console_line, is_no_closed_handshake

SCRIPT = """
import logging, warnings
from svc_common.logs import configure_logging
configure_logging("worker", "{level}")
log = logging.getLogger("quire.worker")
log.debug("too fine")
log.info("step %d done", 7, extra={{"num_tokens": 32}})
logging.getLogger("someone.else").info("chatter")
warnings.warn("old way")
try:
    raise ValueError("broken")
except ValueError:
    log.exception("failed")
"""


def entries(level: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level)], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_away_from_a_terminal_each_line_is_a_json_object() -> None:
    step, warning, failure = entries("info")
    assert datetime.fromisoformat(str(step.pop("ts"))).utcoffset() is not None
    assert step == {
        "level": "info",
        "event": "step 7 done",
        "role": "worker",
        "logger": "quire.worker",
        "num_tokens": 32,
    }
    assert warning["level"] == "warning"
    assert "old way" in str(warning["event"])
    assert "ValueError: broken" in str(failure["exception"])


def test_the_level_sets_what_is_logged() -> None:
    assert [entry["event"] for entry in entries("error")][-1] == "failed"
    assert "step 7 done" not in {entry["event"] for entry in entries("warning")}
    assert "too fine" in {entry["event"] for entry in entries("debug")}


def test_on_a_terminal_a_line_is_for_people() -> None:
    record = logging.LogRecord("quire.worker", logging.WARNING, "x.py", 1, "slow %s", ("step",), None)
    record.num_tokens = 32
    line = ConsoleFormatter("worker").format(record)
    assert line.split(" ", 1)[1] == "worker    warning slow step num_tokens=32"


def test_on_a_terminal_a_value_is_no_line_of_its_own() -> None:
    record = logging.LogRecord("quire.gateway", logging.WARNING, "x.py", 1, "of %s", ("a\nb",), None)
    record.tenant = "é\r\n12:00:00 gateway   error   forged \x1b[31m\u2028\u202e"
    line = ConsoleFormatter("gateway").format(record)
    event, tenant = line.split(" tenant=")
    assert event.endswith("of a\\nb")
    assert tenant == "é\\r\\n12:00:00 gateway   error   forged \\x1b[31m\\u2028\\u202e"


def test_credentials_of_urls_are_not_logged() -> None:
    try:
        raise ValueError("redis://:s3cr3t@h")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord("quire.worker", logging.INFO, "x.py", 1, "at %s", ("redis://:s3cr3t@h",), failure)
    record.url, record.error = "redis://:s3cr3t@h", ValueError("redis://:s3cr3t@h")
    for formatter in (JsonFormatter("worker"), ConsoleFormatter("worker")):
        line = formatter.format(record)
        assert line.count("redis://***@h") == 5  # twice in the traceback
        assert "s3cr3t" not in line


def test_a_json_line_can_be_shown_as_one_for_people() -> None:
    record = logging.LogRecord("quire.worker", logging.INFO, "x.py", 1, "hello", (), None)
    entry = json.loads(JsonFormatter("worker").format(record))
    assert console_line(entry) == ConsoleFormatter("worker").format(record)


def test_a_library_does_not_repeat_a_warning_for_each_request() -> None:
    now = 0.0
    few = FewRepeats(lambda: now)

    def passes(name: str, level: int, message: str) -> logging.LogRecord | None:
        record = logging.LogRecord(name, level, "x.py", 1, message, ("value",), None)
        return record if few.filter(record) else None

    assert passes("uvicorn.error", logging.WARNING, "bad request: %s")
    assert not any(passes("uvicorn.error", logging.WARNING, "bad request: %s") for _ in range(3))
    assert passes("uvicorn.error", logging.WARNING, "another: %s")
    assert passes("another", logging.WARNING, "bad request: %s")
    assert all(passes("quire.gateway", logging.WARNING, "bad: %s") for _ in range(3))
    now = 10.0
    record = passes("uvicorn.error", logging.WARNING, "bad request: %s")
    assert record is not None
    assert vars(record)["num_dropped"] == 3


def test_a_message_that_goes_on_is_logged_less_and_less_often() -> None:
    now = 0.0
    few = FewRepeats(lambda: now)

    def lines(until: float) -> list[float]:
        """When an error that is there every 5 s is logged."""
        nonlocal now
        logged = []
        while now < until:
            if few.filter(logging.LogRecord("exporter", logging.ERROR, "x.py", 1, "failed: %s", ("now",), None)):
                logged.append(now)
            now += 5
        return logged

    assert lines(700) == [0, 10, 30, 70, 150, 310, 630]
    assert len(lines(86_400)) < 150
    now += 1200  # a pause
    assert lines(now + 30) == [now - 30, now - 20]


def test_stack_traces_of_libraries_are_all_logged() -> None:
    few = FewRepeats()
    failure = (ValueError, ValueError(), None)
    assert all(
        few.filter(logging.LogRecord("uvicorn.error", logging.ERROR, "x.py", 1, "failed", (), failure))
        for _ in range(3)
    )


def test_many_messages_of_libraries_take_little_memory() -> None:
    few = FewRepeats()
    for number in range(1000):
        assert few.filter(logging.LogRecord("a", logging.WARNING, "x.py", 1, f"message {number}", (), None))
    assert len(few._logged) <= 256


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (RuntimeError("unable to perform operation on <TCPTransport closed=True 0x1>; the handler is closed"), False),
        (RuntimeError("another defect"), True),
        (OSError("connection lost"), True),
    ],
)
async def test_a_tls_connection_that_is_closed_in_its_handshake_is_not_logged_as_a_defect(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(is_no_closed_handshake)
    try:
        # As uvloop reports it.
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Fatal error on SSL protocol", "exception": error, "protocol": "one", "transport": "another"}
        )
    finally:
        caplog.handler.removeFilter(is_no_closed_handshake)
    assert bool(caplog.records) is is_logged
