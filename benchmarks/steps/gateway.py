"""The gateway's side of a session: submits requests, and reads every event of them."""

import asyncio
from collections.abc import Callable

import grpc

from benchmarks.processes import BenchmarkFailed
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.worker.v1 import worker_pb2 as worker_v1
from svc_common.channels import inner_channel

PROMPT_TOKENS = 64
MAX_TOKENS = 2048

Call = grpc.aio.StreamStreamCall[scheduler_v1.SessionRequest, scheduler_v1.SessionResponse]


async def decode_together(
    address: str, num_sequences: int, num_steps: int, start_worker: Callable[[], object], timeout: float
) -> None:
    """Have as many sequences decode together for `num_steps` steps. Raises BenchmarkFailed.

    All are queued before there is a worker, so that they start as one.
    """
    try:
        async with asyncio.timeout(timeout), inner_channel(address) as channel:
            call: Call = SchedulerServiceStub(channel).Session(wait_for_ready=True)
            for number in range(num_sequences):
                await call.write(scheduler_v1.SessionRequest(submit=_submit(number)))
            waiting = num_sequences
            while waiting:
                waiting -= sum(event.HasField("accepted") for event in (await _read(call)).events)
            start_worker()
            # A message holds a step's events. Those in which some sequences' prompts are computed are more than steps.
            whole = 0
            while whole < num_steps:
                response = await _read(call)
                whole += sum(event.HasField("tokens") for event in response.events) == num_sequences
            call.cancel()
    except TimeoutError:
        raise BenchmarkFailed(f"{num_sequences} sequences did not decode together in {timeout:.0f} s") from None
    except grpc.aio.AioRpcError as error:
        raise BenchmarkFailed(f"the session broke: {error.details()}") from error


def _submit(number: int) -> scheduler_v1.Submit:
    # Prompts differ from the first block on: no sequence shares blocks with another.
    prompt = [number % 1024, number // 1024, *range(PROMPT_TOKENS - 2)]
    return scheduler_v1.Submit(
        key=f"{number:064x}",
        submission_id=str(number),
        tenant="default",
        prompt_token_ids=prompt,
        n=1,
        max_tokens=MAX_TOKENS,
        sampling=worker_v1.SamplingParams(top_p=1, repetition_penalty=1),
    )


async def _read(call: Call) -> scheduler_v1.SessionResponse:
    response = await call.read()
    if not isinstance(response, scheduler_v1.SessionResponse):
        raise BenchmarkFailed("the scheduler ended the session")
    if failed := [event.failed.message for event in response.events if event.HasField("failed")]:
        raise BenchmarkFailed(f"a request failed: {failed[0]}")
    return response
