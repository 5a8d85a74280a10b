"""Starts and stops profiles of workers, at an operator's request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import grpc

from scheduler_svc.model_versions import WorkerName
from scheduler_svc.worker_client import WorkerClient
from svc_common.identity import PLAIN, Outbound

_TIMEOUT = 60.0  # seconds, in which a worker writes its trace


@dataclass(frozen=True, slots=True)
class ProfileAnswer:
    """What a worker answered: the file of its trace, which is empty at the start, or why it refused or failed."""

    worker: WorkerName
    path: str = ""
    problem: str = ""


class WorkerProfiles:
    """Calls workers over channels of their own, beside their step streams."""

    def __init__(self, outbound: Outbound = PLAIN) -> None:
        self._outbound = outbound

    async def start(self, workers: Iterable[WorkerName]) -> list[ProfileAnswer]:
        """Starts a profile on each worker. Raises nothing that a worker answers."""

        async def start(client: WorkerClient) -> str:
            await client.start_profile(_TIMEOUT)
            return ""

        return await self._ask(workers, start)

    async def stop(self, workers: Iterable[WorkerName]) -> list[ProfileAnswer]:
        """Ends the profile of each worker. Raises nothing that a worker answers."""

        async def stop(client: WorkerClient) -> str:
            return (await client.stop_profile(_TIMEOUT)).path

        return await self._ask(workers, stop)

    async def _ask(
        self, workers: Iterable[WorkerName], call: Callable[[WorkerClient], Awaitable[str]]
    ) -> list[ProfileAnswer]:
        async def ask(worker: WorkerName) -> ProfileAnswer:
            try:
                async with self._outbound.channel(worker.address) as channel:
                    return ProfileAnswer(worker, path=await call(WorkerClient(channel, self._outbound.metadata)))
            except grpc.aio.AioRpcError as error:
                return ProfileAnswer(worker, problem=error.details() or error.code().name)

        return await asyncio.gather(*map(ask, workers))
