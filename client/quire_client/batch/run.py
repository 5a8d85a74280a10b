"""Sends the requests of a batch that have no answer yet, and writes each answer as it comes."""

import asyncio
from collections.abc import Callable

from quire_client.batch.client import BatchClient
from quire_client.batch.input import BatchInput
from quire_client.batch.lines import BatchError
from quire_client.batch.output import BatchOutput


async def run_batch(
    batch: BatchInput,
    output: BatchOutput,
    client: BatchClient,
    concurrency: int,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Keeps `concurrency` requests in flight until all are answered. `on_end` is called at each answer.

    Only these requests are in memory. Raises BatchError.
    """
    num_open = batch.num_requests - output.num_answered
    if num_open:
        try:
            await client.check(batch)
        except BatchError:
            output.discard()
            raise
    waiting = batch.requests(output.has)

    async def send_one_after_another() -> None:
        for line in waiting:
            # The name is the same in each process that works on this output: one that replaces a killed process
            # gets the answer that the server has under this name, or waits for the request that still runs.
            output.append(line, await client.send(line, f"{line.id}_{output.run}"))
            on_end()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, num_open)):
                group.create_task(send_one_after_another())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    output.finish()
