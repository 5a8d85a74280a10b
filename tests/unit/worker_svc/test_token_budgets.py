"""With the kernels of deterministic mode, token budgets change no token and no bit of a log-probability.

Sequences pause and continue, with drafts, preemption and prompts in chunks. Nothing is delivered that was not leased.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from core_runner import CoreRunner, Served, submission
from drafters import knowing
from llama_models import VOCAB
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from runner_driver import make_runner
from runner_instance import make_instance
from scheduler_svc.core.budgets import Budget, Demand
from scheduler_svc.core.step import StepPlan

BLOCK, PLENTY, NUM_REQUESTS = 8, 256, 16
LIMITS = scheduler_v1.AccountLimits(account="x/", tokens_per_minute=1000, cached_token_factor=1.0)


class LeasingRunner(CoreRunner):
    """Leases more tokens once nothing can run: sometimes the fewest with which anything does."""

    rng = random.Random(5)

    def _schedule(self) -> StepPlan | None:
        plan = super()._schedule()
        self.core.budgets.check_integrity()
        while plan is None and not self._launched and (demands := self._demands()):
            for budget, demand in demands:
                budget.grant(demand.least + self.rng.choice([0, 100, 300]))
            plan = super()._schedule()
        return plan

    def _demands(self) -> list[tuple[Budget, Demand]]:
        return [(budget, budget.demand) for budget in self.core.budgets if budget.demand is not None]


def _submits() -> list[scheduler_v1.Submit]:
    rng = random.Random(11)
    shared = [rng.randrange(VOCAB) for _ in range(2 * BLOCK + 3)]
    made = []
    for place in range(NUM_REQUESTS):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, BLOCK, 20, 40]))]
        kind: dict[str, Any] = {"temperature": 1.0, "seed": place} if place % 2 else {}
        prompt = shared + prompt if place % 3 == 0 else prompt
        made.append(submission(str(place), prompt, rng.choice([2, 7, 40, 60]), logprobs=2, **kind))
    return made


def _results(served: dict[str, list[Served]]) -> list[tuple[list[int], Any]]:
    return [(one.token_ids, one.logprobs) for sequences in served.values() for one in sequences]


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "in chunks": {"max_step_tokens": 19},
    "swapped": {"num_blocks": 16, "preemption": "swap", "num_host_blocks": 64},
    "computed again": {"num_blocks": 16, "preemption": "recompute"},
}


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_a_budget_changes_no_bit(name: str, has_drafts: bool, tiny_llama: Path) -> None:
    submits = _submits()
    unlimited = CoreRunner(
        make_instance(make_runner(tiny_llama, "compiled", block_size=BLOCK, num_blocks=PLENTY)), PLENTY
    ).serve(submits)
    options: dict[str, Any] = {"num_blocks": PLENTY, "preemption": "auto"} | CIRCUMSTANCES[name]
    num_blocks, preemption = options["num_blocks"], options.pop("preemption")
    if has_drafts:
        texts = [[*submit.prompt_token_ids, *unlimited[submit.key][0].token_ids] for submit in submits]
        options |= {"max_draft_tokens": 4, "make_drafter": knowing(texts, VOCAB, 0)}
    for submit in submits:
        submit.limits.CopyFrom(LIMITS)
    runner = make_runner(tiny_llama, "compiled", block_size=BLOCK, **options)
    limited = LeasingRunner(make_instance(runner), num_blocks, preemption)

    assert _results(limited.serve(submits)) == _results(unlimited)

    (budget,) = limited.core.budgets
    assert budget.spent == sum(len(submit.prompt_token_ids) + submit.max_tokens for submit in submits)
    assert limited.core.totals.pauses > 0
    assert (limited.core.totals.preemptions > 0) == ("preemption" in CIRCUMSTANCES[name])
