"""An operator resets the prefix cache of the workers that a scheduler leads."""

from typing import Any

import pytest

from quire.admin.v1 import admin_pb2 as admin_v1
from scheduler_harness import PROMPT, Deployment, SessionClient, Worker
from scheduler_svc.admin import AdminServicer
from svc_common.errors import QuireError, Reason

CONTEXT: Any = None  # no call reads it
BLOCKS = len(PROMPT) // 4  # full ones


def admin_of(running: Deployment) -> AdminServicer:
    servicer = AdminServicer()
    servicer.lead(running.engine)
    return servicer


async def generate(session: SessionClient, worker: Worker) -> int:
    """Runs a request with PROMPT; returns from which token on it was computed."""
    num_before = len(worker.steps)
    submit = await session.submit(max_tokens=1)
    await session.until(submit.key, "tokens")
    return next(step.scheduled.starts[0] for step in worker.steps[num_before:] if step.new_sequences)


async def test_cached_blocks_are_freed_and_computed_again(running: Deployment, worker: Worker) -> None:
    admin = admin_of(running)
    async with running.session() as session:
        await session.ready()
        assert [await generate(session, worker) for _ in range(2)] == [0, 4 * BLOCKS]
        (reset,) = (await admin.ResetPrefixCache(admin_v1.ResetPrefixCacheRequest(), CONTEXT)).workers
        assert (reset.worker, reset.model) == (f"127.0.0.1:{worker.port}", "checksum")
        assert (reset.num_freed_device_blocks, reset.num_kept_device_blocks) == (BLOCKS, 0)
        assert [await generate(session, worker) for _ in range(2)] == [0, 4 * BLOCKS]


async def test_a_running_sequence_keeps_its_blocks_and_its_tokens(running: Deployment, worker: Worker) -> None:
    admin = admin_of(running)
    async with running.session() as session:
        await session.ready()
        submit = await session.submit(max_tokens=60)
        before = await session.until_tokens(submit.key, 8)
        worker.gate.clear()
        request = admin_v1.ResetPrefixCacheRequest(model="checksum")
        (reset,) = (await admin.ResetPrefixCache(request, CONTEXT)).workers
        assert reset.num_freed_device_blocks == 0
        assert reset.num_kept_device_blocks >= BLOCKS
        worker.gate.set()
        tokens = await session.until_tokens(submit.key, 60)
        assert tokens[: len(before)] == before
        repeated = await session.submit(max_tokens=60)
        assert await session.until_tokens(repeated.key, 60) == tokens


async def test_a_model_without_workers_is_refused(running: Deployment) -> None:
    admin = admin_of(running)
    for call in (
        admin.ResetPrefixCache(admin_v1.ResetPrefixCacheRequest(model="other"), CONTEXT),
        admin.StartProfile(admin_v1.StartProfileRequest(model="other"), CONTEXT),
        admin.StopProfile(admin_v1.StopProfileRequest(model="other"), CONTEXT),
    ):
        with pytest.raises(QuireError) as error:
            await call
        assert (error.value.reason, error.value.field) == (Reason.MODEL_NOT_FOUND, "model")
