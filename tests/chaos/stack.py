"""A whole Quire under the supervisor, in which every role reaches the others through links that can be troubled."""

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
from svc_common.supervisor.addresses import Addresses, assign, free_port
from svc_common.supervisor.console import Console
from svc_common.supervisor.embedded_redis import EmbeddedRedis
from svc_common.supervisor.group import RoleGroup
from svc_common.supervisor.prepare import prepare_model
from svc_common.supervisor.probes import answers_grpc
from svc_common.supervisor.roles import Role, redis_role, service_roles
from svc_common.supervisor.runner import RestartPolicy
from svc_common.supervisor.settings import SupervisorSettings
from tests.chaos.proxy import WHOLE, Link, Trouble

_START_SECONDS = 240.0
_STOP_SECONDS = 20.0
_SAMPLE_SECONDS = 0.4
_PORTS = ("http", "grpc", "scheduler", "scheduler_admin", "scheduler_metrics", "worker", "worker_metrics")


class Stack:
    """What runs, by the names of roles. Signals go to processes of its own alone."""

    def __init__(
        self,
        settings: SupervisorSettings,
        environment: Mapping[str, str],
        log: Path,
        policy: RestartPolicy,
        adapt: Callable[[Role], Role],
    ) -> None:
        """`environment` is what roles are told beside their addresses; `log` takes what they write.

        `adapt` changes a role before it starts.
        """
        models = settings.model_settings()
        addresses = assign(settings, models)
        store = EmbeddedRedis.prepare(settings.run_dir, free_port())
        self.addresses: Addresses = addresses
        self.redis_url = store.url
        """Redis itself, not through a link."""
        self._links: dict[tuple[str, str], Link] = {}
        self._listening: dict[str, str] = {}
        self._name_listeners()

        def changed(role: Role) -> Role:
            return adapt(dataclasses.replace(role, environment={**environment, **role.environment}))

        roles = [redis_role(store), *service_roles(settings, models, addresses, store.url, self._reach)]
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
        """Runs it all until cancelled; sets `ready` once everything answers. Raises what the supervisor raises."""
        await asyncio.gather(*(link.start() for link in self._links.values()))
        try:
            await self._group.run(prepare=lambda: prepare_model({}), announce=ready.set)
        finally:
            await asyncio.gather(*(link.close() for link in self._links.values()))
            self._output.close()

    async def connect(self, client: str, address: str) -> str:
        """The address at which a client reaches a gateway's `address` through a link of its own."""
        link = self._link(client, self._listening[address], address)
        await link.start()
        return link.address

    def instances(self, role: str) -> list[str]:
        """Names of all instances of a role: `gateway-0` and so on."""
        return [name for name in self._group.snapshot()["roles"] if name.partition("-")[0] == role]

    def pid(self, name: str) -> int | None:
        """The process of a role; None while it has none."""
        pid: int | None = self._group.snapshot()["roles"][name]["pid"]
        return pid

    def is_running(self, name: str) -> bool:
        """A role has a process, which is not stopped."""
        return self.pid(name) not in (None, *self._stopped)

    def is_ready(self) -> bool:
        """Every role answers."""
        return all(role["state"] == "ready" for role in self._group.snapshot()["roles"].values())

    def num_restarts(self) -> int:
        """How often any role was started again."""
        return sum(role["restarts"] for role in self._group.snapshot()["roles"].values())

    def send(self, name: str, number: signal.Signals) -> int | None:
        """Sends a signal to a role's process and returns its id; None where it has none just now."""
        if (pid := self.pid(name)) is not None:
            os.kill(pid, number)
            if number is signal.SIGSTOP:
                self._stopped.add(pid)
        return pid

    def resume(self, pid: int) -> None:
        """Lets a process that was stopped go on, if it is still there."""
        self._stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def heal(self) -> None:
        """No process is stopped any more, and all links are whole."""
        for pid in list(self._stopped):
            self.resume(pid)
        self.trouble(self._links, WHOLE)

    def links(self, callers: Iterable[str], callees: Iterable[str]) -> list[tuple[str, str]]:
        """The links from any of the first to any of the second, by names of roles or clients."""
        callers, callees = set(callers), set(callees)
        return [(caller, callee) for caller, callee in self._links if caller in callers and callee in callees]

    def trouble(self, links: Iterable[tuple[str, str]], trouble: Trouble) -> None:
        """Sets what is wrong with links."""
        for ends in links:
            self._links[ends].trouble = trouble

    def mend(self, links: Iterable[tuple[str, str]], trouble: Trouble) -> None:
        """Makes those links whole that still have this very trouble, and no later one."""
        self.trouble([ends for ends in links if self._links[ends].trouble is trouble], WHOLE)

    def gateway_of(self, client: str) -> str | None:
        """The gateway that a client heard from last."""
        heard = [(link.answered_at, callee) for (caller, callee), link in self._links.items() if caller == client]
        return max(heard)[1] if heard else None

    async def leader(self) -> str | None:
        """The scheduler that serves; None while there is none."""
        running = {
            name: each.dial_address
            for name, each in zip(self.instances("scheduler"), self.addresses.schedulers, strict=True)
            if self.is_running(name)
        }
        serving = await asyncio.gather(*(answers_grpc(address)() for address in running.values()))
        return next((name for name, serves in zip(running, serving, strict=True) if serves), None)

    async def running_at_workers(self) -> dict[str, int]:
        """Sequences in an average step of each worker, over a moment from now on."""
        names = [name for name in self.instances("worker") if self.is_running(name)]
        before = await asyncio.gather(*map(self.metrics, names))
        await asyncio.sleep(_SAMPLE_SECONDS)
        after = await asyncio.gather(*map(self.metrics, names))
        steps, decodes = "quire_worker_steps_total", 'quire_worker_tokens_total{kind="decode"}'
        found = {}
        for name, old, new in zip(names, before, after, strict=True):
            # One that has no answer, or was started again meanwhile, runs nothing that could be told.
            num_steps, num_decodes = (new.get(sample, 0) - old.get(sample, 0) for sample in (steps, decodes))
            found[name] = round(num_decodes / num_steps) if old and num_steps > 0 else 0
        return found

    async def metrics(self, name: str) -> dict[str, float]:
        """All samples of a gateway, scheduler or worker, by name with labels as Prometheus writes them,
        but summed over models.

        Empty where it does not answer.
        """
        role = name.partition("-")[0]
        listeners = {
            "gateway": self.addresses.http,
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
        """What Redis would keep for ever."""
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

    def _reach(self, role: str, address: str) -> str:
        """What a role is told: the address of its own link to whoever listens there."""
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
    adapt: Callable[[Role], Role] = lambda role: role,
) -> AsyncIterator[Stack]:
    """Starts everything on free ports, `counts` of each role ({"gateways": 2}), yields it ready, and takes it down.

    `policy` says how soon what dies is started again, and `adapt` changes a role before it starts.

    Raises what the supervisor raises, or AssertionError, where it does not become ready. Where it ends later, by itself
    or by Ctrl-C, its user is cancelled.
    """
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as directory:
        values = (
            {f"{port}_port": 0 for port in _PORTS} | dict(counts) | {"run_dir": Path(directory), "log_level": "info"}
        )
        # Nothing of what the person who runs this has set for a Quire of their own.
        inherited = {name for name in os.environ if name.startswith("QUIRE_") and name != "QUIRE_CACHE_DIR"}
        assert not inherited, f"unset {', '.join(sorted(inherited))} first"
        running = Stack(SupervisorSettings.model_validate(values), environment, log, policy, adapt)
        ready = asyncio.Event()
        supervising = asyncio.create_task(running.run(ready))
        waiting = asyncio.create_task(ready.wait())
        user = asyncio.current_task()
        assert user is not None
        try:
            await asyncio.wait({supervising, waiting}, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()  # raises why
            assert ready.is_set(), f"not ready:\n{log.read_text()[-4000:]}"
            # Ctrl-C ends the supervisor, and what stands on it has nothing more to do then.
            supervising.add_done_callback(end := lambda _: user.cancel())
            try:
                yield running
            finally:
                supervising.remove_done_callback(end)
        finally:
            waiting.cancel()
            running.heal()
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
