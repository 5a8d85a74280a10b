"""A short run of chaos: every kind of process dies, stops and ends under a few clients, and every token is right."""

import asyncio
from pathlib import Path

from reference import kept_references
from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.chaos.run import Plan, run_chaos


async def test_no_token_is_lost_given_twice_or_changed(tmp_path: Path) -> None:
    await prepare_model({})
    model = resolve_model(None).path
    references = await asyncio.to_thread(kept_references, model)
    plan = Plan(num_faults=12, num_clients=6, seed=3, is_small=True)
    outcome = await run_chaos(plan, references, model, tmp_path / "log", print)
    assert outcome.is_right, (tmp_path / "log").read_text()[-4000:]
    assert outcome.summary() == "faults=12 lost=0 duplicated=0 changed=0 incomplete=0"
