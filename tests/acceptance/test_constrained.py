"""A small run of the constrained requests, with real processes and the shallow model."""

from pathlib import Path

from tests.acceptance.constrained import Plan, run_constrained


async def test_outputs_are_valid_and_those_of_the_undisturbed_run(shallow_model: Path, tmp_path: Path) -> None:
    plan = Plan(num_requests=20, num_at_once=12, hostile_tokens=24, hostile_rounds=1, least_disturbed=0.05)
    outcome = await run_constrained(plan, shallow_model, tmp_path / "log", print)
    assert outcome.passed, outcome.errors
