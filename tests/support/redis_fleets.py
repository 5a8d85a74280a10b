"""Real Redis servers beyond a single one without TLS: a primary with a replica and sentinels, a cluster, and TLS."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from certificates import Certificate
from ports import LOOPBACK, lasting_port
from tools import tool

PASSWORD = "s3cret"
SERVICE = "records"
LOCALHOST = ("IP:127.0.0.1", "DNS:localhost")
"""Names in the certificates of servers and clients."""
_NUM_SLOTS = 16_384
_DOWN_AFTER = 2000  # milliseconds without an answer until a server counts as down
_TIMEOUT = 120.0  # seconds
_COMMON = ("--save", "", "--appendonly", "yes", "--repl-diskless-sync-delay", "0", "--maxmemory-policy", "noeviction")


@dataclass(frozen=True)
class ServerTls:
    """Servers that speak TLS only, and require a certificate of the CA; `client` is a client's."""

    ca: Path
    server: Certificate
    client: Certificate

    @property
    def arguments(self) -> list[str]:
        files = ["--tls-cert-file", str(self.server.certificate), "--tls-key-file", str(self.server.key)]
        return [*files, "--tls-ca-cert-file", str(self.ca), "--tls-replication", "yes", "--tls-cluster", "yes"]

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of a client."""
        files = {"ssl_certfile": str(self.client.certificate), "ssl_keyfile": str(self.client.key)}
        return {"ssl": True, "ssl_ca_certs": str(self.ca), **files}


@dataclass(frozen=True)
class RedisFleet:
    """Servers of which one, the primary, has the keys of a deployment."""

    url: str
    processes: Mapping[int, "subprocess.Popen[bytes]"]
    """By port."""
    find_primary: Callable[[], int]
    """The port of the primary."""
    sentinels: Sequence["subprocess.Popen[bytes]"] = ()

    def kill_primary(self) -> None:
        process = self.processes[self.find_primary()]
        process.kill()
        process.wait()


class FleetServers:
    """Starts servers, and stops them at the end of the block."""

    def __init__(self, directory: Path, tls: ServerTls | None) -> None:
        self.scheme = "redis" if tls is None else "rediss"
        self._directory = directory
        self._tls = tls
        self._stack = ExitStack()

    def __enter__(self) -> "FleetServers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, port: int, *arguments: str, password: str | None = PASSWORD) -> "subprocess.Popen[bytes]":
        """A server with its data in a directory of its own, once it answers."""
        home = self._directory / str(port)
        home.mkdir()
        login = ["--requirepass", password, "--masterauth", password] if password else []
        ports = ["--port", str(port)]
        if self._tls is not None:
            ports = ["--port", "0", "--tls-port", str(port), *self._tls.arguments]
        command = [tool("redis-server"), *arguments, *ports, "--bind", LOOPBACK, "--dir", str(home), *login]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)  # first
        until(self.client(port, password).ping)
        return process

    def client(self, port: int, password: str | None = PASSWORD) -> Any:
        options = {} if self._tls is None else self._tls.options
        retry = Retry(NoBackoff(), 0)
        client = redis.Redis(host=LOOPBACK, port=port, password=password, socket_timeout=5, retry=retry, **options)
        return self._stack.enter_context(client)


def until(is_so: Callable[[], Any]) -> None:
    """Waits until a condition holds. A server that does not answer yet is no failure."""
    end = time.monotonic() + _TIMEOUT
    while time.monotonic() < end:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        time.sleep(0.05)
    raise AssertionError("the servers did not get ready")


@contextmanager
def tls_server(directory: Path, tls: ServerTls) -> Iterator[str]:
    """The URL of one server."""
    with FleetServers(directory, tls) as servers:
        port = lasting_port()
        servers.start(port)
        yield f"rediss://:{PASSWORD}@{LOOPBACK}:{port}/0"


@contextmanager
def sentinel_fleet(directory: Path, tls: ServerTls | None = None) -> Iterator[RedisFleet]:
    """A primary, a replica and three sentinels, of which two agree on a failover."""
    with FleetServers(directory, tls) as servers:
        first, second = lasting_port(), lasting_port()
        processes = {first: servers.start(first, *_COMMON)}
        processes[second] = servers.start(second, *_COMMON, "--replicaof", f"{LOOPBACK} {first}")
        ports = [lasting_port() for _ in range(3)]
        sentinels = []
        for port in ports:
            path = directory / f"sentinel-{port}.conf"
            path.write_text(
                f"sentinel monitor {SERVICE} {LOOPBACK} {first} 2\n"
                f"sentinel auth-pass {SERVICE} {PASSWORD}\n"
                f"sentinel down-after-milliseconds {SERVICE} {_DOWN_AFTER}\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
            )
            sentinels.append(servers.start(port, str(path), "--sentinel", password=None))
        clients = [servers.client(port, password=None) for port in ports]

        def know_each_other() -> bool:
            states = [client.sentinel_master(SERVICE) for client in clients]
            return all(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2 for state in states)

        until(know_each_other)
        replica = servers.client(second)
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        addresses = ",".join(f"{LOOPBACK}:{port}" for port in ports)
        yield RedisFleet(
            f"{servers.scheme}+sentinel://:{PASSWORD}@{addresses}/{SERVICE}/0",
            processes,
            lambda: int(clients[0].sentinel_master(SERVICE)["port"]),
            sentinels,
        )


@contextmanager
def cluster_fleet(directory: Path, key: str, tls: ServerTls | None = None) -> Iterator[RedisFleet]:
    """Three primaries, and a replica of the one that has `key`."""
    with FleetServers(directory, tls) as servers:
        ports = [lasting_port() for _ in range(4)]
        bus = {port: lasting_port() for port in ports}
        of_cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(_DOWN_AFTER))
        processes = {
            port: servers.start(port, *_COMMON, *of_cluster, "--cluster-port", str(bus[port])) for port in ports
        }
        clients = {port: servers.client(port) for port in ports}
        seed, *others = ports
        for port in others:
            clients[seed].execute_command("CLUSTER MEET", LOOPBACK, port, bus[port])
        *primaries, spare = ports
        bounds = [_NUM_SLOTS * index // 3 for index in range(4)]
        for index, port in enumerate(primaries):
            clients[port].execute_command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        until(lambda: all(len(client.cluster("nodes")) == 4 for client in clients.values()))
        slot = int(clients[seed].cluster("keyslot", key))
        owner = primaries[next(index for index in range(3) if slot < bounds[index + 1])]
        clients[spare].execute_command("CLUSTER REPLICATE", clients[owner].execute_command("CLUSTER MYID").decode())
        until(lambda: clients[spare].info("replication")["master_link_status"] == "up")
        until(lambda: all(client.cluster("info")["cluster_state"] == "ok" for client in clients.values()))
        addresses = ",".join(f"{LOOPBACK}:{port}" for port in ports[:2])
        yield RedisFleet(f"{servers.scheme}+cluster://:{PASSWORD}@{addresses}", processes, lambda: owner)
