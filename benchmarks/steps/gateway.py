"""The gateway's side of a session: submits requests, and reads every event of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter

import grpc

from benchmarks.processes import BenchmarkFailed
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.channels import internal_channel

PROMPT_TOKENS = 64
MAX_TOKENS = 2048
_RETRY = 0.05

Call = grpc.aio.StreamStreamCall[scheduler_v1.SessionRequest, scheduler_v1.SessionResponse]


async def decode_together(
    address: str, num_sequences: int, num_steps: int, start_worker: Callable[[], object], timeout: float
) -> list[float]:
    """Has as many sequences decode together for `num_steps` steps; when the results of each came (`perf_counter`).

    All are queued before there is a worker, so that they start as one. Raises BenchmarkFailed.
    """
    message = f"{num_sequences} sequences did not decode together in {timeout:.0f} s"
    async with _session(address, timeout, message) as call:
        await _submit_all(call, num_sequences, MAX_TOKENS)
        start_worker()
        # A message holds a step's events. Those in which some sequences' prompts are computed are more than steps.
        times: list[float] = []
        while len(times) < num_steps:
            response = await _read(call)
            if sum(event.HasField("tokens") for event in response.events) == num_sequences:
                times.append(perf_counter())
        return times


async def decode_to_the_end(
    address: str, num_sequences: int, max_tokens: int, start_worker: Callable[[], object], timeout: float
) -> None:
    """Has as many sequences generate `max_tokens` each. Raises BenchmarkFailed."""
    message = f"{num_sequences} sequences did not end in {timeout:.0f} s"
    async with _session(address, timeout, message) as call:
        await _submit_all(call, num_sequences, max_tokens)
        start_worker()
        running = num_sequences
        while running:
            running -= sum(event.tokens.HasField("end") for event in (await _read(call)).events)


@asynccontextmanager
async def _session(address: str, timeout: float, message: str) -> AsyncIterator[Call]:
    try:
        async with asyncio.timeout(timeout), internal_channel(address) as channel:
            call = await _open(channel)
            yield call
            call.cancel()
    except TimeoutError:
        raise BenchmarkFailed(message) from None
    except grpc.aio.AioRpcError as error:
        raise BenchmarkFailed(f"the session broke: {error.details()}") from error


async def _open(channel: grpc.aio.Channel) -> Call:
    """A session with the scheduler, once it leads."""
    while True:
        call: Call = SchedulerServiceStub(channel).Session(wait_for_ready=True)
        try:
            await _read(call)  # its status
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(_RETRY)
        else:
            return call


async def _submit_all(call: Call, num_sequences: int, max_tokens: int) -> None:
    for number in range(num_sequences):
        await call.write(scheduler_v1.SessionRequest(submit=_submit(number, max_tokens)))
    waiting = num_sequences
    while waiting:
        waiting -= sum(event.HasField("accepted") for event in (await _read(call)).events)


def _submit(number: int, max_tokens: int) -> scheduler_v1.Submit:
    # Prompts differ from the first block on: no sequence shares blocks with another.
    prompt = [number % 1024, number // 1024, *range(PROMPT_TOKENS - 2)]
    return scheduler_v1.Submit(
        key=f"{number:064x}",
        submission_id=str(number),
        command_id=number + 1,
        tenant="default",
        prompt_token_ids=prompt,
        n=1,
        max_tokens=max_tokens,
        sampling=worker_v1.SamplingParams(top_p=1, repetition_penalty=1),
    )


async def _read(call: Call) -> scheduler_v1.SessionResponse:
    response = await call.read()
    if not isinstance(response, scheduler_v1.SessionResponse):
        raise BenchmarkFailed("the scheduler ended the session")
    if failed := [event.failed.message for event in response.events if event.HasField("failed")]:
        raise BenchmarkFailed(f"a request failed: {failed[0]}")
    return response
