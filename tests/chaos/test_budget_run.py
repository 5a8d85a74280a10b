"""A short run: a key with a token budget, and the leading scheduler is killed in the middle of it."""

from pathlib import Path

import pytest

from tests.chaos.budget_run import BudgetPlan, run_budgets

PLAN = BudgetPlan(num_streams=24, per_minute=480, max_tokens=40, stop_at=480)


@pytest.mark.usefixtures("shallow_model")
async def test_no_token_is_delivered_beyond_the_budget_of_a_key(tmp_path: Path) -> None:
    outcome = await run_budgets(PLAN, tmp_path / "log", print)
    assert outcome.most_beyond <= 0
    assert outcome.delivered >= 480, "the key gets its budget, under the next scheduler, too"
    assert 0 < outcome.delivered_before_death < outcome.delivered
    assert outcome.num_free_ended == 5, "those without a limit do not wait for those with one"
