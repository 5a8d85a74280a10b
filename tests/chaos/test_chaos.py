"""A short run: roles are killed, stopped and terminated while a few clients run, and every token is correct."""

import asyncio
from pathlib import Path

from reference import kept_references
from tests.chaos.checker import ViolationKind
from tests.chaos.run import Plan, run_chaos


async def test_no_token_is_lost_duplicated_or_changed(shallow_model: Path, tmp_path: Path) -> None:
    references = await asyncio.to_thread(kept_references, shallow_model)
    plan = Plan(num_faults=9, num_clients=6, seed=3, is_small=True)
    outcome = await run_chaos(plan, references, shallow_model, tmp_path / "log", print)
    assert outcome.passed, (tmp_path / "log").read_text()[-4000:]
    summary = outcome.summary()
    assert {kind: summary[kind] for kind in ViolationKind} == dict.fromkeys(ViolationKind, 0)
    assert summary["faults"] == 9
    assert summary["requests"] >= plan.num_clients
