"""A complete deployment under the supervisor. Each role connects to the others through proxies that inject faults."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import redis

from prometheus_page import read_samples
from svc_common.supervisor.addresses import Addresses, FreePorts, assign
from svc_common.supervisor.console import Console
from svc_common.supervisor.deployment_secret import prepare_secret
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from svc_common.supervisor.group import RoleGroup
from svc_common.supervisor.prepare import prepare_model
from svc_common.supervisor.probes import answers_grpc
from svc_common.supervisor.roles import Role, redis_role, service_roles
from svc_common.supervisor.runner import RestartPolicy
from svc_common.supervisor.settings import SupervisorSettings
from tests.chaos.proxy import NO_FAULT, Link, LinkFault

_START_SECONDS = 240.0
_STOP_SECONDS = 20.0
_SAMPLE_SECONDS = 0.4
_PORTS = (
    *("http", "grpc", "gateway_metrics"),
    *("scheduler", "scheduler_admin", "scheduler_metrics"),
    *("worker", "worker_metrics"),
)


class Stack:
    """The running roles, by name. It sends signals only to processes that it started."""

    def __init__(
        self,
        settings: SupervisorSettings,
        environment: Mapping[str, str],
        log: Path,
        policy: RestartPolicy,
        change_role: Callable[[Role], Role],
        free_ports: FreePorts,
    ) -> None:
        """`environment` is added to the environment of each role. Their output is written to `log`.

        `change_role` is applied to each role before it starts.
        """
        models = settings.model_settings()
        addresses = assign(settings, models, free_ports)
        store = EmbeddedRedis.prepare(settings.run_dir, free_ports.take())
        self.addresses: Addresses = addresses
        self.redis_url = store.url
        """The direct URL, without a link."""
        self._links: dict[tuple[str, str], Link] = {}
        self._listening: dict[str, str] = {}
        self._name_listeners()

        def changed(role: Role) -> Role:
            return change_role(dataclasses.replace(role, environment={**environment, **role.environment}))

        secret_file = prepare_secret(settings)
        services = service_roles(settings, models, addresses, store.url, self._link_address, secret_file)
        roles = [redis_role(store), *services]
        self._stopped: set[int] = set()
        self._output = log.open("w")
        self._group = RoleGroup(
            [changed(role) for role in roles],
            Console(self._output),
            policy=policy,
            stop_seconds=_STOP_SECONDS,
            on_change=lambda _: None,
        )

    async def run(self, ready: asyncio.Event) -> None:
        """Runs all roles until cancelled; sets `ready` when all are ready. Raises the errors of the supervisor."""
        await asyncio.gather(*(link.start() for link in self._links.values()))
        try:
            await self._group.run(prepare=lambda: prepare_model({}), announce=ready.set)
        finally:
            await asyncio.gather(*(link.close() for link in self._links.values()))
            self._output.close()

    async def connect(self, client: str, address: str) -> str:
        """Starts a link from a client to a gateway's `address`; returns the address of the link."""
        link = self._link(client, self._listening[address], address)
        await link.start()
        return link.address

    def instances(self, role: str) -> list[str]:
        """Names of all instances of a role, such as `gateway-0`."""
        return [name for name in self._group.snapshot()["roles"] if name.partition("-")[0] == role]

    def pid(self, name: str) -> int | None:
        """The process id of a role; None while it has no process."""
        pid: int | None = self._group.snapshot()["roles"][name]["pid"]
        return pid

    def is_running(self, name: str) -> bool:
        """Whether a role has a process that is not stopped."""
        return self.pid(name) not in (None, *self._stopped)

    def is_ready(self) -> bool:
        """Whether every role is ready."""
        return all(role["state"] == "ready" for role in self._group.snapshot()["roles"].values())

    def num_restarts(self) -> int:
        """Restarts of all roles."""
        return sum(role["restarts"] for role in self._group.snapshot()["roles"].values())

    def send(self, name: str, number: signal.Signals) -> int | None:
        """Sends a signal to a role's process. Returns the process id; None if the role has no process."""
        if (pid := self.pid(name)) is not None:
            os.kill(pid, number)
            if number is signal.SIGSTOP:
                self._stopped.add(pid)
        return pid

    def resume(self, pid: int) -> None:
        """Sends SIGCONT to a process, if it still exists."""
        self._stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def clear_faults(self) -> None:
        """Continues all stopped processes and clears the faults of all links."""
        for pid in list(self._stopped):
            self.resume(pid)
        self.set_link_fault(self._links, NO_FAULT)

    def links(self, callers: Iterable[str], callees: Iterable[str]) -> list[tuple[str, str]]:
        """The links from `callers` to `callees`, both names of roles or clients."""
        callers, callees = set(callers), set(callees)
        return [(caller, callee) for caller, callee in self._links if caller in callers and callee in callees]

    def set_link_fault(self, links: Iterable[tuple[str, str]], fault: LinkFault) -> None:
        """Sets the fault of links."""
        for ends in links:
            self._links[ends].fault = fault

    def clear_link_fault(self, links: Iterable[tuple[str, str]], fault: LinkFault) -> None:
        """Clears those links that still have this fault object, and no later one."""
        self.set_link_fault([ends for ends in links if self._links[ends].fault is fault], NO_FAULT)

    def last_gateway(self, client: str) -> str | None:
        """The gateway from which a client received data last."""
        responses = [
            (link.last_response_at, callee) for (caller, callee), link in self._links.items() if caller == client
        ]
        return max(responses)[1] if responses else None

    async def leader(self) -> str | None:
        """The scheduler that leads; None while there is none."""
        running = {
            name: each.dial_address
            for name, each in zip(self.instances("scheduler"), self.addresses.schedulers, strict=True)
            if self.is_running(name)
        }
        serving = await asyncio.gather(*(answers_grpc(address)() for address in running.values()))
        return next((name for name, serves in zip(running, serving, strict=True) if serves), None)

    async def num_decoding_by_worker(self) -> dict[str, int]:
        """Decoding sequences per step of each worker: the mean over the next 0.4 s."""
        names = [name for name in self.instances("worker") if self.is_running(name)]
        before = await asyncio.gather(*map(self.metrics, names))
        await asyncio.sleep(_SAMPLE_SECONDS)
        after = await asyncio.gather(*map(self.metrics, names))
        steps, decodes = "quire_worker_steps_total", 'quire_worker_tokens_total{kind="decode"}'
        found = {}
        for name, old, new in zip(names, before, after, strict=True):
            # A worker that did not answer, or restarted meanwhile, counts as 0.
            num_steps, num_decodes = (new.get(sample, 0) - old.get(sample, 0) for sample in (steps, decodes))
            found[name] = round(num_decodes / num_steps) if old and num_steps > 0 else 0
        return found

    async def metrics(self, name: str) -> dict[str, float]:
        """All samples of a gateway, scheduler or worker, by name and labels, summed over models.

        Empty if it does not answer.
        """
        role = name.partition("-")[0]
        listeners = {
            "gateway": self.addresses.gateway_metrics,
            "scheduler": self.addresses.scheduler_metrics,
            "worker": self.addresses.worker_metrics,
        }
        address = listeners[role][self.instances(role).index(name)].dial_address

        def read() -> dict[str, float]:
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=1) as response:
                    return read_samples(response.read().decode())
            except OSError:
                return {}

        return await asyncio.to_thread(read)

    def keys_without_ttl(self) -> list[str]:
        """Keys in Redis without a time to live."""
        with redis.Redis.from_url(self.redis_url, decode_responses=True) as store:
            return [key for key in store.scan_iter() if store.ttl(key) == -1]

    def _name_listeners(self) -> None:
        addresses = self.addresses
        for role, listeners in (
            ("gateway", addresses.http),
            ("gateway", addresses.grpc),
            ("scheduler", addresses.schedulers),
            ("worker", addresses.workers),
        ):
            for index, listener in enumerate(listeners):
                name = role if len(listeners) == 1 else f"{role}-{index}"
                self._listening[listener.dial_address] = name
        self._listening[urlsplit(self.redis_url).netloc.rpartition("@")[2]] = "redis"

    def _link_address(self, role: str, address: str) -> str:
        """The address of a role's link to the listener at `address`."""
        if "://" not in address:
            return self._link(role, self._listening[address], address).address
        url = urlsplit(address)
        login, _, listens_at = url.netloc.rpartition("@")
        link = self._link(role, self._listening[listens_at], listens_at)
        return url._replace(netloc=f"{login}@{link.address}").geturl()

    def _link(self, caller: str, callee: str, address: str) -> Link:
        ends = caller, callee
        if ends not in self._links:
            self._links[ends] = Link(address)
        return self._links[ends]


@asynccontextmanager
async def stack(
    log: Path,
    environment: Mapping[str, str],
    counts: Mapping[str, int],
    policy: RestartPolicy,
    change_role: Callable[[Role], Role] = lambda role: role,
) -> AsyncIterator[Stack]:
    """Starts a stack on free ports, with `counts` of each role ({"gateways": 2}), yields it when ready, and stops it.

    `policy` is the supervisor's policy for restarts. `change_role` is applied to each role before it starts.

    Raises the errors of the supervisor, or AssertionError if the stack does not become ready. If the supervisor ends
    later, by itself or by Ctrl-C, the task that uses the stack is cancelled.
    """
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as directory, FreePorts() as free_ports:
        values = (
            {f"{port}_port": 0 for port in _PORTS} | dict(counts) | {"run_dir": Path(directory), "log_level": "info"}
        )
        # The settings of the environment must not reach the roles.
        inherited = {name for name in os.environ if name.startswith("QUIRE_") and name != "QUIRE_CACHE_DIR"}
        assert not inherited, f"unset {', '.join(sorted(inherited))} first"
        running = Stack(SupervisorSettings.model_validate(values), environment, log, policy, change_role, free_ports)
        ready = asyncio.Event()
        supervising = asyncio.create_task(running.run(ready))
        waiting = asyncio.create_task(ready.wait())
        user = asyncio.current_task()
        assert user is not None
        try:
            await asyncio.wait({supervising, waiting}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done() and (error := supervising.exception()) is not None:
                error.add_note(f"the roles wrote:\n{log.read_text()[-4000:]}")
                raise error
            assert ready.is_set(), f"not ready:\n{log.read_text()[-4000:]}"
            # Ctrl-C ends the supervisor; the test cannot continue without it.
            supervising.add_done_callback(end := lambda _: user.cancel())
            try:
                yield running
            finally:
                supervising.remove_done_callback(end)
        finally:
            waiting.cancel()
            running.clear_faults()
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
