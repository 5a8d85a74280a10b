"""Sessions begin and end, and several attach to one request."""

import redis

from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_harness import (
    PROMPT,
    Deployment,
    Worker,
    expected,
    idle,
    scheduler,
    submit_of,
    until_over,
    until_recorded,
)
from scheduler_svc.live_state import Graces, LiveState
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore


def unflushed(
    offset: int, token_ids: list[int], index: int = 0, is_truncated: bool = False
) -> scheduler_v1.UnflushedTokens:
    return scheduler_v1.UnflushedTokens(index=index, offset=offset, token_ids=token_ids, is_truncated=is_truncated)


async def test_a_second_session_gets_everything_and_both_go_on(running: Deployment) -> None:
    async with running.session() as first, running.session() as second:
        await first.ready()
        submit = await first.submit(max_tokens=200, n=2, detachable=True)
        await first.until_tokens(submit.key, 20)
        attached = (await second.attach(submit.key)).attached
        assert attached.render_options == submit.render_options
        assert (attached.prompt_length, attached.num_sequences, attached.seed) == (len(PROMPT), 2, 1)
        assert (attached.submission_id, attached.detachable) == (submit.submission_id, True)
        for session in (first, second):
            for index in range(2):
                assert await session.until_tokens(submit.key, 200, index) == expected(200)
    await idle(running.engine)


async def test_a_request_under_the_same_name_with_the_same_body_attaches(running: Deployment) -> None:
    async with running.session() as first, running.session() as second:
        await first.ready()
        submit = await first.submit(max_tokens=200, detachable=True)
        await first.until_tokens(submit.key, 5)
        again = await second.submit(key=submit.key, body_digest=submit.body_digest, max_tokens=200)
        answer = await second.answer(again.command_id)
        assert answer.attached.submission_id == submit.submission_id
        assert await second.until_tokens(submit.key, 200) == expected(200)
        assert await first.until_tokens(submit.key, 200) == expected(200)


async def test_a_finished_request_is_given_again(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        sampling = worker_v1.SamplingParams(seed=7)
        submit = await session.submit(sampling=sampling, detachable=True)
        await session.until(submit.key, "tokens")
        await until_recorded(store, submit.key, State.FINISHED)
        await session.until((await session.submit()).key, "tokens")
    async with running.session() as session:
        by_name = await session.submit(key=submit.key, body_digest=submit.body_digest)
        for answer in (await session.attach(submit.key), await session.answer(by_name.command_id)):
            [tokens] = answer.attached.sequences
            assert (list(tokens.token_ids), tokens.end.WhichOneof("cause")) == (expected(8), "length")
            assert tokens.cached_tokens == 0
            assert (answer.attached.seed, answer.attached.render_options) == (7, submit.render_options)
    assert not running.engine.is_live(submit.key)


async def test_a_gateway_of_the_release_before_does_not_continue_an_answer_that_it_would_not_divide(
    running: Deployment,
) -> None:
    """It would send reasoning and calls as text. Another gateway may have the later release."""
    turn = scheduler_v1.TurnFormat(tools="hermes")
    render_options = scheduler_v1.RenderOptions(request_id="r", model="checksum", n=1, turn=turn)
    async with running.session() as old, running.session() as new:
        for session in (old, new):
            await session.ready()
        await new.send(hello=scheduler_v1.Hello(protocol=2))
        submit = await new.submit(max_tokens=200, detachable=True, render_options=render_options)
        await new.until_tokens(submit.key, 5)
        assert (await old.attach(submit.key)).failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert (await new.attach(submit.key)).attached.render_options == render_options
        plain = await new.submit(max_tokens=200, detachable=True)
        await new.until_tokens(plain.key, 5)
        assert (await old.attach(plain.key)).WhichOneof("kind") == "attached"


async def test_attaching_to_a_cancelled_request_fails(running: Deployment, store: RedisStore) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=200)
        await session.send(cancel=scheduler_v1.Cancel(key=submit.key))
        await session.until(submit.key, "failed")
        assert (await session.attach(submit.key)).failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        await until_recorded(store, submit.key, State.CANCELLED)


async def test_an_unknown_request_cannot_be_attached_to(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        assert (await session.attach("nobody's")).failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST


async def test_a_resumption_takes_part_and_begins_nothing(
    running: Deployment, store: RedisStore, worker: Worker
) -> None:
    async with running.session() as session:
        await session.ready()
        unknown = await session.submit(is_resumption=True, detachable=True)
        answer = await session.answer(unknown.command_id)
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        assert worker.steps == []
        assert await store.read(unknown.key) is None
        submit = await session.submit(max_tokens=100, detachable=True)
        await session.until_tokens(submit.key, 1)
        for _ in range(2):  # once while it runs, once from the store
            asked = {"key": submit.key, "is_resumption": True}
            same = await session.submit(body_digest=submit.body_digest, **asked)
            assert (await session.answer(same.command_id)).attached.submission_id == submit.submission_id
            other = await session.submit(body_digest=b"another", **asked)
            assert (await session.answer(other.command_id)).failed.reason == scheduler_v1.FAILURE_REASON_KEY_IN_USE
            await until_recorded(store, submit.key, State.FINISHED)
            await session.until((await session.submit()).key, "tokens")


async def test_a_request_is_detached_when_its_last_session_leaves(redis_url: str, worker: Worker) -> None:
    worker.gate.clear()
    async with scheduler(redis_url, [worker.port], detach_grace=0.05) as running:
        async with running.session() as first, running.session() as second:
            await first.ready()
            submit = await first.submit(detachable=True, max_tokens=200)
            await first.until(submit.key, "accepted")
            await second.attach(submit.key)
            await first.send(detach=scheduler_v1.Detach(key=submit.key))
            assert (await first.attach("nobody's")).HasField("failed")  # the detach was handled
            live = running.engine.requests.get(submit.key)
            assert live is not None
            assert live.state is LiveState.ATTACHED
            await second.send(detach=scheduler_v1.Detach(key=submit.key))
            await until_over(running.engine, submit.key)
            assert (await first.attach(submit.key)).failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
        worker.gate.set()
        await idle(running.engine)


async def test_a_request_that_is_attached_within_the_grace_continues(running: Deployment, worker: Worker) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, max_tokens=200)
        await session.until_tokens(submit.key, 5)
        worker.gate.clear()
        await session.send(detach=scheduler_v1.Detach(key=submit.key))
        assert (await session.attach(submit.key)).HasField("attached")
        live = running.engine.requests.get(submit.key)
        assert live is not None
        assert live.state is LiveState.ATTACHED
        worker.gate.set()
        assert await session.until_tokens(submit.key, 200) == expected(200)


async def test_unnamed_requests_end_when_their_gateway_detaches(running: Deployment, worker: Worker) -> None:
    worker.gate.clear()
    async with running.session() as session:
        await session.ready()
        submit = await session.submit()
        await session.until(submit.key, "accepted")
        await session.send(detach=scheduler_v1.Detach(key=submit.key))
        assert (await session.attach(submit.key)).failed.reason == scheduler_v1.FAILURE_REASON_CANCELLED
    worker.gate.set()
    await idle(running.engine)


async def test_a_broken_session_leaves_its_gateway_time_to_come_back(running: Deployment, worker: Worker) -> None:
    worker.gate.clear()
    async with running.session() as session:
        await session.ready()
        unnamed = await session.submit(max_tokens=20)
        named = await session.submit(max_tokens=20, detachable=True)
        await session.until(named.key, "accepted")
    async with running.session() as session:
        for submit in (unnamed, named):
            assert (await session.attach(submit.key)).HasField("attached")
        worker.gate.set()
        for submit in (unnamed, named):
            assert await session.until_tokens(submit.key, 20) == expected(20)


async def test_what_nobody_comes_back_for_fails_and_may_be_tried_again(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    worker.gate.clear()
    async with scheduler(redis_url, [worker.port], graces=Graces(broken=0.05)) as running:
        async with running.session() as session:
            await session.ready()
            unnamed = await session.submit()
            named = await session.submit(detachable=True)
            await session.until(named.key, "accepted")
        await until_over(running.engine, unnamed.key)
        assert running.engine.is_live(named.key)
        worker.gate.set()
        await until_recorded(store, unnamed.key, State.FAILED)
        await until_recorded(store, named.key, State.FINISHED)
        async with running.session() as session:
            too_late = await session.attach(unnamed.key)
        assert too_late.failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        await idle(running.engine)


async def test_detached_request_does_not_wait_for_a_search_of_stop_strings(
    running: Deployment, store: RedisStore
) -> None:
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(detachable=True, has_stop_strings=True, max_tokens=150)
        await session.until(submit.key, "accepted")
    log = await until_recorded(store, submit.key, State.FINISHED)
    assert log.sequences[0].token_ids == expected(150)


async def test_a_gateway_that_reconnects_during_the_acceptance_receives_it(running: Deployment, redis_url: str) -> None:
    async with running.session() as session:
        await session.ready()
        with redis.Redis.from_url(redis_url) as client:
            client.client_pause(500)
        submit = await session.submit()
    async with running.session() as session:
        await session.send(submit=submit)
        await session.until(submit.key, "tokens")
        assert session.kinds(submit.key) in (["accepted"], ["attached"])
        assert session.tokens(submit.key) == expected(8)


async def test_a_request_that_no_scheduler_knows_starts_from_what_its_gateway_holds(running: Deployment) -> None:
    async with running.session() as session:
        await session.ready()
        other = [7, 8, 9]
        submit = submit_of(max_tokens=20, n=2, command_id=1, unflushed=[unflushed(0, other, index=1)])
        await session.send(submit=submit)
        answer = await session.answer(1)
        assert [list(part.token_ids) for part in answer.attached.sequences] == [[], other]
        assert await session.until_tokens(submit.key, 20) == expected(20)
        live = running.engine.requests.get(submit.key)
        assert live is None or not live.log.submit.unflushed
        assert await session.until_tokens(submit.key, 20, 1) == other + expected(17, [*PROMPT, *other])


async def test_a_gateway_that_holds_something_else_than_others_were_given_is_refused(running: Deployment) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(max_tokens=200, detachable=True)
        await session.until_tokens(submit.key, 20)
        answer = await other.attach(submit.key, unflushed(10, [7, 8, 9]))
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_DIVERGED
        assert await session.until_tokens(submit.key, 200) == expected(200)


async def test_a_stop_string_that_one_gateway_found_ends_the_sequence_for_all(running: Deployment) -> None:
    async with running.session() as session, running.session() as other:
        await session.ready()
        submit = await session.submit(max_tokens=200, detachable=True, has_stop_strings=True)
        held = await session.until_tokens(submit.key, 64)
        answer = await other.attach(submit.key, unflushed(40, held[40:50], is_truncated=True))
        assert list(answer.attached.sequences[0].token_ids) == expected(50)
        assert answer.attached.sequences[0].end.HasField("stop_string")
        await until_over(running.engine, submit.key)
    await idle(running.engine)
