"""Requests without a record, which their gateway submits again to the next leader; messages with several commands."""

import asyncio
import uuid

import pytest

from checksum_service import ChecksumService, serve
from memory_worker import prompt_value
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_harness import (
    PROMPT,
    TIMEOUT,
    Deployment,
    SessionClient,
    Worker,
    candidate,
    expected,
    idle,
    scheduler,
    submit_of,
)

NONE = scheduler_v1.Retention(is_unrecorded=True)
OVER_QUOTA = scheduler_v1.FAILURE_REASON_TENANT_OVER_QUOTA
VALUE: dict[str, object] = {"max_tokens": 0, "result": worker_v1.ResultKind(embedding=worker_v1.EmbeddingResult())}


def limits(**values: int) -> scheduler_v1.AccountLimits:
    return scheduler_v1.AccountLimits(account=f"{uuid.uuid4().hex}/", **values)


def repeated(submit: scheduler_v1.Submit, **changes: object) -> scheduler_v1.Submit:
    """The Submit of a gateway whose Attach was answered with "unknown request"."""
    again = scheduler_v1.Submit()
    again.CopyFrom(submit)
    again.MergeFrom(scheduler_v1.Submit(command_id=1000, was_accepted=True, **changes))  # type: ignore[arg-type]
    return again


async def kind_of_answer(session: SessionClient, submit: scheduler_v1.Submit) -> str | None:
    answer: scheduler_v1.Event = await session.answer(submit.command_id)
    kind: str | None = answer.WhichOneof("kind")
    return kind


@pytest.mark.parametrize(("fields", "cost_of_output"), [(VALUE, 0), ({"max_tokens": 8}, 8)])
async def test_a_prompt_without_a_record_is_paid_once(
    fields: dict[str, object], cost_of_output: int, redis_url: str
) -> None:
    service = ChecksumService(results={"embedding": worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV})
    server, port = await serve(service)
    account = limits(tokens_per_minute=300)
    async with candidate(redis_url, [port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            service.gate.clear()
            submit = await session.submit(retention=NONE, limits=account, **fields)
            paid = (await session.until(submit.key, "prompt_paid")).prompt_paid
            assert paid.num_tokens == len(PROMPT)
            await first.crash()
            service.gate.set()
    async with scheduler(redis_url, [port]) as second, second.session() as anew:
        await anew.ready()
        unknown = await anew.attach(submit.key)
        assert unknown.failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        await anew.send(submit=repeated(submit, prompt_cost=paid.num_tokens))
        assert (await anew.answer(1000)).HasField("accepted")
        tokens = (await anew.until(submit.key, "tokens")).tokens
        if cost_of_output:
            assert anew.tokens(submit.key) == expected(8)
        else:
            assert list(tokens.end.value.numbers) == prompt_value(PROMPT, "embedding")
        assert "prompt_paid" not in anew.kinds(submit.key)
        assert [budget.spent for budget in second.engine.budgets] in ([cost_of_output], [])
    await server.stop(0)


async def test_what_is_recorded_of_a_prompt_is_not_sent(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(limits=limits(tokens_per_minute=300))
        await session.until(submit.key, "tokens")
        assert session.kinds(submit.key) == ["accepted"]


async def test_a_request_that_was_accepted_counts_once_for_the_rate_of_requests(running: Deployment) -> None:
    account = limits(requests_per_minute=1)
    async with running.session() as session:
        await session.ready()
        first = await session.submit(retention=NONE, limits=account)
        assert await kind_of_answer(session, first) == "accepted"
        await session.until(first.key, "tokens")
        refused = await session.submit(retention=NONE, limits=account)
        assert (await session.answer(refused.command_id)).failed.reason == OVER_QUOTA
        again = repeated(submit_of(retention=NONE, limits=account))
        await session.send(submit=again)
        assert await kind_of_answer(session, again) == "accepted"
        await session.until(again.key, "tokens")
        assert session.tokens(again.key) == expected(8)


async def test_a_request_that_was_accepted_is_not_refused_by_a_full_queue(running: Deployment, worker: Worker) -> None:
    account = limits(max_running=1, max_queued=1)
    async with running.session() as session:
        await session.ready()
        worker.gate.clear()
        running_one = await session.submit(limits=account)
        await session.until(running_one.key, "accepted")
        while not worker.steps:
            await session.read()  # a heartbeat at the latest
        waiting = await session.submit(limits=account)
        assert await kind_of_answer(session, waiting) == "accepted"
        refused = await session.submit(retention=NONE, limits=account)
        assert (await session.answer(refused.command_id)).failed.reason == OVER_QUOTA
        again = repeated(submit_of(retention=NONE, limits=account))
        await session.send(submit=again)
        assert await kind_of_answer(session, again) == "accepted"
        worker.gate.set()
        for submit in (running_one, waiting, again):
            await session.until(submit.key, "tokens")
            assert session.tokens(submit.key) == expected(8)
    await idle(running.engine)


async def test_a_request_that_was_accepted_joins_the_one_that_runs(running: Deployment, worker: Worker) -> None:
    async with running.session() as session:
        await session.ready()
        worker.gate.clear()
        submit = await session.submit(retention=NONE)
        assert await kind_of_answer(session, submit) == "accepted"
        await session.send(submit=repeated(submit))
        assert (await session.answer(1000)).HasField("accepted")
        worker.gate.set()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(8)


async def test_commands_in_one_message_are_handled_in_their_order(running: Deployment, worker: Worker) -> None:
    prompts = [[number] * 4 for number in range(12)]
    submits = [
        submit_of(command_id=number + 1, prompt_token_ids=prompt, retention=NONE)
        for number, prompt in enumerate(prompts)
    ]
    commands = [scheduler_v1.SessionRequest(submit=submit) for submit in submits]
    commands.insert(1, scheduler_v1.SessionRequest(cancel=scheduler_v1.Cancel(key=submits[0].key)))
    async with running.session() as session:
        await session.ready()
        await session.send(batch=scheduler_v1.CommandBatch(commands=commands))
        for submit, prompt in zip(submits[1:], prompts[1:], strict=True):
            await session.until(submit.key, "tokens")
            assert session.tokens(submit.key) == expected(8, prompt)
        assert session.kinds(submits[0].key) == ["accepted", "failed"]
        # All of them are in the first step, although each could have had one of its own.
        assert len(worker.steps[0].scheduled.sequence_ids) == 11
    async with asyncio.timeout(TIMEOUT):
        await idle(running.engine)
