"""What follows from a response to a request of a batch."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from quire_client.batch.retries import NextStep, next_step, retry_after, waiting_time


@pytest.mark.parametrize(
    ("status", "step"),
    [
        (200, NextStep.WRITE),
        (201, NextStep.WRITE),
        (301, NextStep.END),
        (400, NextStep.WRITE),
        (401, NextStep.END),
        (403, NextStep.END),
        (404, NextStep.WRITE),
        (408, NextStep.RETRY),
        (409, NextStep.WRITE),
        (413, NextStep.WRITE),
        (429, NextStep.RETRY),
        (499, NextStep.RETRY_FEW),
        (500, NextStep.RETRY_FEW),
        (502, NextStep.RETRY),
        (503, NextStep.RETRY),
        (504, NextStep.RETRY),
    ],
)
def test_a_status_says_what_to_do(status: int, step: NextStep) -> None:
    assert next_step(status, {}, b"<html>") is step


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_may_rule_out_a_retry(status: int) -> None:
    assert next_step(status, {"x-should-retry": "false"}, b"") is NextStep.WRITE


@pytest.mark.parametrize(("status", "code"), [(409, "idempotency_key_reused"), (500, "request_lost")])
def test_a_name_that_cannot_be_used_is_replaced(status: int, code: str) -> None:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    assert next_step(status, {"x-should-retry": "false"}, body) is NextStep.RENAME


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"error": "no"}', b"\xff"])
def test_a_body_of_another_kind_is_no_reason_to_fail(body: bytes) -> None:
    assert next_step(500, {}, body) is NextStep.RETRY_FEW


def test_a_response_says_how_long_to_wait_in_seconds_or_by_a_date() -> None:
    assert retry_after({"retry-after": "7"}) == 7
    assert retry_after({}) is None
    assert retry_after({"retry-after": "soon"}) is None
    date = datetime.now(UTC) + timedelta(seconds=100)
    assert 90 < (retry_after({"retry-after": format_datetime(date, usegmt=True)}) or 0) <= 100
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0


@pytest.mark.parametrize(
    "date",
    [
        "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
        "Wed, 21 Oct 12345 07:28:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999999999999",
    ],
)
def test_a_date_that_cannot_be_held_is_none(date: str) -> None:
    assert retry_after({"retry-after": date}) is None


def test_the_time_that_the_server_requests_is_waited_if_it_is_longer_than_the_backoff() -> None:
    for _ in range(100):
        assert 7 <= waiting_time(1, 7) <= 7.7
        assert 0.25 <= waiting_time(1, None) <= 0.5
        assert 1 <= waiting_time(3, None) <= 2
        assert 5 <= waiting_time(10_000, None) <= 10
        assert 0.25 <= waiting_time(1, 0) <= 0.5
        assert 5 <= waiting_time(10_000, 0.0) <= 10


def test_the_wait_is_bounded() -> None:
    year = retry_after({"retry-after": "9" * 400})
    assert 300 <= waiting_time(1, year) <= 330
    assert 300 <= waiting_time(1, retry_after({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"})) <= 330
