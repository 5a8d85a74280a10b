"""A scheduler dies or stops, and another one continues with the records of the store and the tokens of gateways."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from checksum_service import ChecksumService, serve
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_harness import (
    PROMPT,
    TIMEOUT,
    Deployment,
    Worker,
    candidate,
    expected,
    finish_of,
    idle,
    left_behind,
    scheduler,
    until_over,
    until_recorded,
)
from scheduler_svc.live_state import Graces
from scheduler_svc.request_log import State
from scheduler_svc.store.redis import RedisStore
from tests.chaos.proxy import NO_FAULT, Link, LinkFault


def unflushed(
    offset: int, token_ids: list[int], index: int = 0, is_truncated: bool = False
) -> scheduler_v1.UnflushedTokens:
    return scheduler_v1.UnflushedTokens(index=index, offset=offset, token_ids=token_ids, is_truncated=is_truncated)


AT_ONCE = Graces(taken_over=0.05)
ENDLESS = Graces(detached=3600, broken=3600, taken_over=3600, unclaimed=7200)


@asynccontextmanager
async def taken_over(
    redis_url: str, worker: Worker, graces: Graces = ENDLESS, **settings: object
) -> AsyncIterator[Deployment]:
    async with scheduler(redis_url, [worker.port], graces=graces, **settings) as running:
        yield running


async def test_a_request_continues_after_a_crash_from_the_clients_tokens(redis_url: str, worker: Worker) -> None:
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200, n=2)
            held = [await session.until_tokens(submit.key, 40, index) for index in range(2)]
            epoch = first.engine.epoch
            worker.gate.clear()
            await first.crash()
            worker.gate.set()
            async with taken_over(redis_url, worker) as second, second.session() as anew:
                assert second.engine.epoch > epoch
                answer = await anew.attach(submit.key, *(unflushed(0, tokens, i) for i, tokens in enumerate(held)))
                for index, sequence in enumerate(answer.attached.sequences):
                    assert list(sequence.token_ids)[: len(held[index])] == held[index]
                    assert await anew.until_tokens(submit.key, 200, index) == expected(200)


async def test_nothing_runs_before_its_gateway_comes(redis_url: str, worker: Worker, store: RedisStore) -> None:
    submit = await left_behind(store, expected(5), [])
    async with taken_over(redis_url, worker) as running, running.session() as session:
        await session.ready()
        other = await session.submit()
        await session.until(other.key, "tokens")
        assert running.engine.is_live(submit.key)
        assert not any(model.core.is_live(submit.key) for model in running.engine.models)
        answer = await session.attach(submit.key, unflushed(3, expected(9)[3:]))
        assert [list(part.token_ids) for part in answer.attached.sequences] == [expected(9), []]
        for index in range(2):
            assert await session.until_tokens(submit.key, 20, index) == expected(20)


@pytest.mark.parametrize("known", [expected(10), [*expected(3), 7, 7, 7]], ids=["beyond", "against"])
async def test_what_a_gateway_holds_wins_over_the_store(
    known: list[int], redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, known)
    given = [*expected(3), 8, 8]
    async with taken_over(redis_url, worker) as running, running.session() as session:
        answer = await session.attach(submit.key, unflushed(2, given[2:]))
        assert list(answer.attached.sequences[0].token_ids) == given
        whole = given + expected(15, [*PROMPT, *given])
        assert await session.until_tokens(submit.key, 20) == whole
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == whole


@pytest.mark.parametrize("is_truncated", [False, True])
async def test_a_request_whose_clients_have_its_end_is_not_computed_again(
    is_truncated: bool, redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), max_tokens=20 if is_truncated else 9)
    end = unflushed(5, expected(9)[5:], is_truncated=is_truncated)
    async with taken_over(redis_url, worker) as running, running.session() as session:
        other = await session.attach(submit.key, end, submission_id="other")
        assert other.failed.reason == scheduler_v1.FAILURE_REASON_UNKNOWN_REQUEST
        answer = await session.attach(submit.key, end, submission_id=submit.submission_id)
        assert list(answer.attached.sequences[0].token_ids) == expected(9)
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(9)
        assert running.engine.requests.get(submit.key) is None


async def test_a_tail_behind_a_hole_is_refused(redis_url: str, worker: Worker, store: RedisStore) -> None:
    submit = await left_behind(store, expected(5))
    async with taken_over(redis_url, worker) as running, running.session() as session:
        answer = await session.attach(submit.key, unflushed(8, [1, 2]))
        assert answer.failed.reason == scheduler_v1.FAILURE_REASON_DIVERGED
        assert (await session.attach(submit.key)).HasField("attached")


async def test_a_request_that_runs_again_goes_back_to_what_a_late_gateway_holds(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), detachable=True, max_tokens=200)
    async with taken_over(redis_url, worker, graces=AT_ONCE) as running:
        live = running.engine.requests.get(submit.key)
        assert live is not None
        async with asyncio.timeout(TIMEOUT):
            while len(live.log.sequences[0].token_ids) < 50:
                await asyncio.sleep(0.001)
        worker.gate.clear()
        given = [*expected(10), 8, 8]
        async with running.session() as session:
            answer = await session.attach(submit.key, unflushed(5, given[5:]))
            assert list(answer.attached.sequences[0].token_ids) == given
            worker.gate.set()
            assert await session.until_tokens(submit.key, 200) == given + expected(188, [*PROMPT, *given])
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == given + expected(188, [*PROMPT, *given])
    await idle(running.engine)


async def test_a_tail_that_ends_the_request_ends_it(redis_url: str, worker: Worker, store: RedisStore) -> None:
    submit = await left_behind(store, expected(5), has_stop_strings=True)
    async with taken_over(redis_url, worker) as running, running.session() as session:
        answer = await session.attach(submit.key, unflushed(5, expected(7)[5:], is_truncated=True))
        [tokens] = answer.attached.sequences
        assert (list(tokens.token_ids), tokens.end.WhichOneof("cause")) == (expected(7), "stop_string")
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(7)
        assert worker.steps == []


async def test_a_stop_match_truncates_a_request_without_a_gateway(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(7), has_stop_strings=True)
    async with taken_over(redis_url, worker) as running, running.session() as session:
        for _ in range(2):
            await session.send(finish=finish_of(submit, 6))
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert log.sequences[0].token_ids == expected(6)


async def test_named_requests_run_on_without_their_gateway(redis_url: str, worker: Worker, store: RedisStore) -> None:
    submit = await left_behind(store, expected(5), [], detachable=True)
    async with taken_over(redis_url, worker, graces=AT_ONCE):
        log = await until_recorded(store, submit.key, State.FINISHED)
        assert [sequence.token_ids for sequence in log.sequences] == [expected(20)] * 2


async def test_unnamed_requests_wait_for_their_gateway_and_are_given_up(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5))
    async with taken_over(redis_url, worker, graces=Graces(taken_over=0.05, unclaimed=0.1)) as running:
        await until_over(running.engine, submit.key)
        await until_recorded(store, submit.key, State.FAILED)
        assert worker.steps == []


async def test_a_repeated_submission_attaches(redis_url: str, worker: Worker, store: RedisStore) -> None:
    submit = await left_behind(store, [])
    async with taken_over(redis_url, worker) as running, running.session() as session:
        submit.command_id = 1
        await session.send(submit=submit)
        assert (await session.answer(1)).HasField("accepted")
        assert await session.until_tokens(submit.key, 20) == expected(20)


async def test_a_search_begins_anew(redis_url: str, worker: Worker, store: RedisStore) -> None:
    search = scheduler_v1.BeamSearch(width=2, early_stopping=scheduler_v1.EARLY_STOPPING_AT_WIDTH)
    submit = await left_behind(store, [], beam_search=search)
    async with taken_over(redis_url, worker) as running, running.session() as session:
        assert list((await session.attach(submit.key)).attached.sequences) == []
        assert any(model.core.is_live(submit.key) for model in running.engine.models)


async def test_blocks_that_the_worker_kept_are_not_computed_again(redis_url: str, worker: Worker) -> None:
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200)
            held = await session.until_tokens(submit.key, 60)
            await first.crash()
        num_steps = len(worker.steps)
        async with taken_over(redis_url, worker) as second, second.session() as session:
            await session.attach(submit.key, unflushed(0, held))
            assert await session.until_tokens(submit.key, 200) == expected(200)
    anew = next(step for step in worker.steps[num_steps:] if step.new_sequences)
    assert anew.scheduled.starts[0] >= 40


@pytest.mark.parametrize("graces", [AT_ONCE, ENDLESS], ids=["running", "held"])
async def test_what_another_model_began_does_not_go_on(
    graces: Graces, redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), fingerprint=b"another", detachable=True)
    async with taken_over(redis_url, worker, graces=graces) as running, running.session() as session:
        log = await until_recorded(store, submit.key, State.FAILED)
        assert log.failure == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert (await session.attach(submit.key)).failed.reason == scheduler_v1.FAILURE_REASON_UNAVAILABLE
        assert worker.steps == []


async def test_a_request_continues_on_the_version_that_began_it(
    redis_url: str, worker: Worker, store: RedisStore
) -> None:
    submit = await left_behind(store, expected(5), fingerprint=worker.about.fingerprint, detachable=True)
    other = await left_behind(store, [], detachable=True)
    async with taken_over(redis_url, worker, graces=AT_ONCE):
        for key in (submit.key, other.key):
            log = await until_recorded(store, key, State.FINISHED)
            assert log.fingerprint == worker.about.fingerprint


async def test_a_standby_takes_over_when_the_leader_hands_over(redis_url: str, worker: Worker) -> None:
    port = worker.port
    async with candidate(redis_url, [port]) as first:
        await first.until_leading()
        async with candidate(redis_url, [port], standby=True) as second, first.session() as session:
            await session.ready()
            async with second.session() as refused:
                assert await refused.end() is grpc.StatusCode.UNAVAILABLE
            submit = await session.submit(max_tokens=200)
            await session.until_tokens(submit.key, 20)
            assert not second.leads.is_set()
            await first.hand_over()
            assert await session.end() is grpc.StatusCode.UNAVAILABLE
            held = session.tokens(submit.key)
            await second.until_leading()
            async with second.session() as anew:
                answer = await anew.attach(submit.key)  # everything that was committed is in the store
                assert list(answer.attached.sequences[0].token_ids)[: len(held)] == held
                assert await anew.until_tokens(submit.key, 200) == expected(200)


class FencingWorker(ChecksumService):
    """Reports the epoch of its last stream, and ends those of earlier terms, as a worker does."""

    async def Step(
        self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
    ) -> AsyncIterator[worker_v1.StepResponse]:
        async def noted() -> AsyncIterator[worker_v1.StepRequest]:
            async for request in requests:
                self.about.epoch = max(self.about.epoch, request.epoch)
                yield request

        try:
            async for response in super().Step(noted(), context):
                if response.epoch < self.about.epoch:
                    break
                yield response
        except KeyError:  # a step of an earlier term
            pass
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "superseded")


@pytest.mark.parametrize("fault", [LinkFault(is_stalled=True), LinkFault(is_reset=True)], ids=["stalled", "reset"])
async def test_a_leader_that_is_cut_off_from_the_store_leaves_its_gateways_to_the_next(
    redis_url: str, fault: LinkFault
) -> None:
    """The next one has the workers, so that the first one has nothing to send to its gateways but heartbeats."""
    address = urlsplit(redis_url).netloc.rpartition("@")[2]
    service = FencingWorker()
    service.seconds = 0.01
    server, port = await serve(service)
    async with (
        Link(address) as link,
        scheduler(redis_url.replace(address, link.address), [port]) as first,
        candidate(redis_url, [port], standby=True) as second,
    ):
        async with first.session() as session:
            await session.ready()
            submit = await session.submit(max_tokens=200)
            await session.until_tokens(submit.key, 20)
            link.fault = fault
            await second.until_leading()
            async with asyncio.timeout(TIMEOUT):
                assert await session.end() is grpc.StatusCode.UNAVAILABLE
            held = session.tokens(submit.key)
            async with second.session() as anew:
                answer = await anew.attach(submit.key, unflushed(0, held))
                assert list(answer.attached.sequences[0].token_ids)[: len(held)] == held
                assert await anew.until_tokens(submit.key, 200) == expected(200)
        link.fault = NO_FAULT
    await server.stop(0)


async def test_a_leader_that_was_replaced_ends(redis_url: str, worker: Worker, store: RedisStore) -> None:
    async with candidate(redis_url, [worker.port]) as first:
        await first.until_leading()
        async with asyncio.timeout(TIMEOUT):
            while await store.take_lease("another", 30) is None:  # the first one may renew its lease in between
                await store.release_lease(first.leader._holder)
        await asyncio.wait_for(first.leading, TIMEOUT)
        await store.release_lease("another")


async def test_a_worker_that_served_a_later_term_gets_a_later_one(redis_url: str) -> None:
    async with scheduler(redis_url, []) as probe:
        later = probe.engine.epoch + 10**9
    service = ChecksumService(epoch=later)
    server, port = await serve(service)
    async with scheduler(redis_url, [port]) as running, running.session() as session:
        await session.ready()
        assert running.engine.epoch > later
        assert service.openings[0].epoch == running.engine.epoch
        submit = await session.submit()
        await session.until(submit.key, "tokens")
        assert session.tokens(submit.key) == expected(8)
        assert session.epochs[-1] > later
    await server.stop(0)
