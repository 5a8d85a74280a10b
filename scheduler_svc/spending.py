"""What accounts have spent, for the journal: it is written in the same call as the tokens."""

from collections.abc import Iterable

from scheduler_svc.core.budgets import Budgets
from scheduler_svc.request_log import RequestLog
from scheduler_svc.store.base import PromptCharge, Spent, WriteBatch


class Spending:
    """Adds to each batch what the store does not have yet. They are sums: writing one again changes nothing."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._written: dict[str, Spent] = {}  # by account

    def add_to(self, batch: WriteBatch, logs: Iterable[RequestLog]) -> None:
        """Adds what the prompts of these logs cost, and what all accounts have spent."""
        recorded = set(batch.records)  # their records are written anew, without the cost
        batch.prompt_charges.extend(
            PromptCharge(log.key, log.submit.submission_id, log.prompt_cost)
            for log in logs
            if log.prompt_cost and (not log.is_prompt_cost_durable or log in recorded)
        )
        sums = [Spent(budget.account, budget.term, budget.spent) for budget in self._budgets if budget.spent]
        batch.spending.extend(one for one in sums if self._written.get(one.account) != one)

    def note_written(self, batch: WriteBatch, logs: Iterable[RequestLog]) -> None:
        """The store has a batch that was made of these logs."""
        keys = {charge.key for charge in batch.prompt_charges}
        for log in logs:
            log.is_prompt_cost_durable = log.is_prompt_cost_durable or log.key in keys
        accounts = {budget.account for budget in self._budgets}
        known = self._written | {spent.account: spent for spent in batch.spending}
        self._written = {account: spent for account, spent in known.items() if account in accounts}
