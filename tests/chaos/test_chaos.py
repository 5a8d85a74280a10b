"""A short run: roles are killed, stopped and terminated while a few clients run, and every token is correct."""

import asyncio
from pathlib import Path

from reference import kept_references
from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.chaos.checker import ViolationKind
from tests.chaos.run import Plan, run_chaos


async def test_no_token_is_lost_duplicated_or_changed(tmp_path: Path) -> None:
    await prepare_model({})
    model = resolve_model(None).path
    references = await asyncio.to_thread(kept_references, model)
    plan = Plan(num_faults=9, num_clients=6, seed=3, is_small=True)
    outcome = await run_chaos(plan, references, model, tmp_path / "log", print)
    assert outcome.passed, (tmp_path / "log").read_text()[-4000:]
    summary = outcome.summary()
    assert {kind: summary[kind] for kind in ViolationKind} == dict.fromkeys(ViolationKind, 0)
    assert summary["faults"] == 9
    assert summary["requests"] >= plan.num_clients
