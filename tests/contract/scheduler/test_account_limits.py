"""Limits of an account, from the session stream to the steps of a worker."""

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scheduler_harness import Deployment, Worker, candidate, expected, idle, scheduler
from scheduler_svc.live_state import Graces

ENDLESS = Graces(detached=3600, broken=3600, taken_over=3600, unclaimed=7200)


def limits(**values: int) -> scheduler_v1.AccountLimits:
    return scheduler_v1.AccountLimits(account="default/", **values)


def widest(worker: Worker) -> int:
    """The most sequences that a step had."""
    return max(len(step.scheduled.sequence_ids) for step in worker.steps)


async def test_requests_of_an_account_wait_for_each_other_and_more_are_refused(
    running: Deployment, worker: Worker
) -> None:
    allowed = limits(max_running=1, max_queued=1)
    async with running.session() as session:
        await session.ready()
        worker.gate.clear()
        first = await session.submit(limits=allowed)
        await session.until(first.key, "accepted")
        while not worker.steps:
            await session.read()  # a heartbeat at the latest
        second = await session.submit(limits=allowed)
        await session.until(second.key, "accepted")
        third = await session.submit(limits=allowed)
        refusal = (await session.until(third.key, "failed")).failed
        assert refusal.reason == scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
        assert refusal.message == "1 requests of this account wait, and max_queued of its API keys is 1"
        assert refusal.HasField("retry_after")
        worker.gate.set()
        for submit in (first, second):
            await session.until(submit.key, "tokens")
            assert session.tokens(submit.key) == expected(8)
    assert widest(worker) == 1
    await idle(running.engine)


async def test_a_new_leader_knows_the_limits_of_recorded_requests(redis_url: str, worker: Worker) -> None:
    worker.seconds = 0.01
    async with candidate(redis_url, [worker.port], graces=ENDLESS) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submits = [await session.submit(max_tokens=60, limits=limits(max_running=1)) for _ in range(3)]
            for submit in submits:
                await session.until(submit.key, "accepted")
            await session.until_tokens(submits[0].key, 5)
            worker.gate.clear()
            await first.crash()
            worker.gate.set()
            async with scheduler(redis_url, [worker.port], graces=ENDLESS) as second, second.session() as anew:
                held = session.tokens(submits[0].key)
                await anew.attach(submits[0].key, scheduler_v1.UnflushedTokens(index=0, offset=0, token_ids=held))
                for submit in submits[1:]:
                    await anew.attach(submit.key)
                for submit in submits:
                    assert await anew.until_tokens(submit.key, 60) == expected(60)
    assert widest(worker) == 1


async def test_what_cannot_fit_the_limit_of_blocks_is_refused(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        fits = await session.submit(max_tokens=10, limits=limits(max_kv_blocks=5))
        await session.until(fits.key, "tokens")
        too_long = await session.submit(max_tokens=11, limits=limits(max_kv_blocks=5))
        refusal = (await session.until(too_long.key, "failed")).failed
        assert refusal.reason == scheduler_v1.FAILURE_REASON_TOO_MANY_TOKENS
        assert "up to 6 KV blocks of 4 tokens, and max_kv_blocks of the API key is 5" in refusal.message
