"""A small run of the constrained requests, with real processes and the real model."""

from pathlib import Path

from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.acceptance.constrained import Plan, run_constrained


async def test_outputs_are_valid_and_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    await prepare_model({})
    plan = Plan(num_requests=20, num_at_once=12, hostile_tokens=24, hostile_rounds=1, least_disturbed=0.05)
    outcome = await run_constrained(plan, resolve_model(None).path, tmp_path / "log", print)
    assert outcome.passed, outcome.errors
