"""The links to all workers, whose names are resolved again and again."""

import asyncio
import logging
import socket
from collections.abc import Sequence

from scheduler_svc.engine import SchedulerEngine
from scheduler_svc.worker_link import WorkerLink
from svc_common.addresses import HostPort, join_host_port
from svc_common.identity import PLAIN, Outbound

log = logging.getLogger("quire.scheduler")

_RESOLVE = 3.0  # seconds between look-ups of the workers' names


class WorkerPool:
    """A link to each worker at the configured names, which are resolved every few seconds."""

    def __init__(self, engine: SchedulerEngine, addresses: Sequence[HostPort], outbound: Outbound = PLAIN) -> None:
        self._engine = engine
        self._outbound = outbound
        self._addresses = addresses
        self._links: dict[str, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._resolved: dict[HostPort, set[str]] = {}  # by name, its addresses when it was last resolved
        self._unresolved: set[HostPort] = set()  # names that could not be resolved

    async def run(self) -> None:
        """Keeps the links until cancelled."""
        try:
            while True:
                found = await self._resolve()
                self._links = {where: (link, task) for where, (link, task) in self._links.items() if not task.done()}
                for address in found - self._links.keys():
                    link = WorkerLink(self._engine, address, self._update_connected, self._outbound)
                    self._links[address] = (link, asyncio.create_task(link.run()))
                for address, (link, _) in self._links.items():
                    if address in found:
                        link.stay()
                    else:
                        link.leave()
                self._update_connected()
                await asyncio.sleep(_RESOLVE)
        finally:
            tasks = [task for _, task in self._links.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _update_connected(self) -> None:
        links = [link for link, _ in self._links.values()]
        all_connected = bool(links) and all(link.is_connected for link in links)
        self._engine.models.all_connected = all_connected and not self._unresolved

    async def _resolve(self) -> set[str]:
        for address in self._addresses:
            host, port = address.host, address.port
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                # Workers that were found under the name before are kept.
                log.warning("cannot resolve the workers' name", extra={"host": host, "why": str(error)})
                self._unresolved.add(address)
            else:
                self._resolved[address] = {join_host_port(str(where[0]), int(where[1])) for *_, where in infos}
                self._unresolved.discard(address)
        return set().union(*self._resolved.values())
