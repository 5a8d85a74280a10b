"""A small batch, whose client and server are killed, with real processes; and what its check finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.batch import (
    AFTER_CANCELLATION,
    BatchOutcome,
    BatchPlan,
    check_answers,
    is_refused,
    make_line,
    run_batch_with_kills,
)

PLAN = BatchPlan(num_lines=40, num_kills=2, max_tokens=8, concurrency=8)


@pytest.mark.usefixtures("shallow_model")
async def test_each_line_is_answered_once(tmp_path: Path) -> None:
    outcome = await run_batch_with_kills(PLAN, tmp_path, print)
    assert outcome.errors == [], (tmp_path / "log").read_text()[-4000:]
    assert (outcome.num_lines, outcome.num_refused) == (40, 1)
    assert (outcome.num_client_kills, len(outcome.server_kills)) == (2, 2)


@pytest.mark.usefixtures("shallow_model")
async def test_requests_that_were_cancelled_while_the_client_was_away_are_submitted_again(tmp_path: Path) -> None:
    outcome = await run_batch_with_kills(AFTER_CANCELLATION, tmp_path, print)
    assert outcome.errors == [], (tmp_path / "log").read_text()[-4000:]
    assert (outcome.num_lines, outcome.num_client_kills, outcome.server_kills) == (24, 1, [])
    assert outcome.num_prompt_tokens_repeated > 0


def answer(number: int, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"usage": {"completion_tokens": PLAN.max_tokens}}
    if is_refused(number):
        body = {"error": {"message": "temperature: must be 0 to 2"}}
    response = {"status_code": 400 if is_refused(number) else 200, "body": body}
    return {"custom_id": make_line(number, PLAN.max_tokens)["custom_id"], "response": response | changes}


RIGHT = [answer(number) for number in range(PLAN.num_lines)]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (RIGHT, None),
        (RIGHT[1:], "line 0 is there 0 times"),
        ([*RIGHT, RIGHT[3]], "line 3 is there 2 times"),
        ([*RIGHT, answer(40)], "lines that the input does not have: ['line-40']"),
        ([answer(0, status_code=500), *RIGHT[1:]], "line-0: status 500: "),
        ([answer(0, body={}), *RIGHT[1:]], "line-0: status 200: {}"),
    ],
)
def test_what_is_wrong_with_an_output_is_found(answers: list[dict[str, Any]], error: str | None) -> None:
    outcome = BatchOutcome()
    check_answers("\n".join(map(json.dumps, answers)).encode(), PLAN, outcome)
    if error is None:
        assert outcome.errors == []
    else:
        assert any(found.startswith(error) for found in outcome.errors)
