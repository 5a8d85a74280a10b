"""What accounts have spent is added to the journal's batches until it is written."""

from request_logs import request_log
from scheduler_svc.core.account_limits import AccountLimits
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.request_log import RequestLog
from scheduler_svc.spending import Spending
from scheduler_svc.store.base import PromptCharge, Spent, WriteBatch


def batch_of(spending: Spending, *logs: RequestLog, recorded: tuple[RequestLog, ...] = ()) -> WriteBatch:
    batch = WriteBatch(records=list(recorded))
    spending.add_to(batch, logs)
    return batch


def test_sums_are_sent_again_until_they_are_written_and_when_they_have_grown() -> None:
    budgets = Budgets("7")
    spending = Spending(budgets)
    charge = budgets.charge(AccountLimits("x/", tokens_per_minute=600), 10, None, 0.0)
    assert charge is not None
    assert batch_of(spending).spending == []
    charge.budget.spent = 20
    batch = batch_of(spending)
    assert batch.spending == batch_of(spending).spending == [Spent("x/", charge.budget.term, 20)]
    spending.note_written(batch, [])
    assert batch_of(spending).spending == []
    charge.budget.spent = 21
    assert batch_of(spending).spending == [Spent("x/", charge.budget.term, 21)]


def test_the_cost_of_a_prompt_is_sent_again_with_a_new_record() -> None:
    spending, log = Spending(Budgets()), request_log()
    assert batch_of(spending, log).prompt_charges == []
    log.prompt_cost = 32
    assert not log.is_durable
    batch = batch_of(spending, log)
    assert batch.prompt_charges == [PromptCharge(log.key, log.submit.submission_id, 32)]
    assert not batch.is_empty
    spending.note_written(batch, [log, request_log()])
    assert log.is_prompt_cost_durable
    assert batch_of(spending, log).is_empty
    assert batch_of(spending, log, recorded=(log,)).prompt_charges == batch.prompt_charges
