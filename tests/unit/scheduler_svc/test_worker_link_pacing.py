"""A link paces the steps of its worker."""

from worker_links import ScriptedWorker, deployment, served, until


async def test_a_request_is_in_the_step_after_the_one_that_runs_when_it_arrives() -> None:
    """The next step is planned late, not when the running one begins."""
    worker = ScriptedWorker()
    async with served(worker) as addresses, deployment(*addresses) as running:
        await running.workers(1)
        for _ in range(200):
            running.engine.replicas[0].costs.observe_step(0, 1, 60.0)
        worker.gate.clear()
        first = running.gateway.submit()
        await until(lambda: bool(worker.steps))
        await worker.looked_at()
        assert len(worker.steps) == 1
        second = running.gateway.submit()
        await until(lambda: running.engine.is_live(second))
        worker.gate.set()
        await running.gateway.finish(first)
        await running.gateway.finish(second)
    assert [len(step.scheduled.sequence_ids) for step in worker.steps[:2]] == [1, 2]
