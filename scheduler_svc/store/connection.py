"""Connections to a Redis: one server, the primary that sentinels name, or the node of a cluster that has the keys."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from svc_common.redis_tls import NO_FILES, RedisTlsFiles
from svc_common.redis_url import RedisLayout, RedisTarget
from svc_common.tls_files import no_password

_MANY = 2**31  # connections, as redis-py has it where the URL sets no limit
_TIMEOUT = 1.0  # seconds that Redis may take to connect, and for each answer
_SENTINEL_TIMEOUT = 0.3  # seconds; one sentinel is asked after another until one answers, within one call of ours

_LOOK_INTERVAL = 1.0  # seconds between questions to sentinels who is the primary, while there are calls


class RedisConnections(Protocol):
    """Connections to the servers of a target, opened as they are needed. A failed command is not repeated."""

    @property
    def client(self) -> Any:
        """Sends commands."""
        ...

    @property
    def max_connections(self) -> int:
        """How many commands may run at once: more of them fail."""
        ...

    def node_of(self, key: str) -> object:
        """The server that has a key, as far as that is known. Another one than before may lack the latest writes."""
        ...

    def follow_primary(self) -> None:
        """To be called before each command: sees to it that commands soon go to another primary, if there is one."""
        ...

    async def memory_info(self, key: str) -> Mapping[str, Any]:
        """The section `memory` of INFO of the server that has a key."""
        ...

    async def hang_up(self) -> None:
        """Closes the connections that are not in use."""
        ...

    async def close(self) -> None: ...


def connect(target: RedisTarget, tls: RedisTlsFiles = NO_FILES) -> RedisConnections:
    """Connections to a target."""
    files = tls.options if target.has_tls else {}
    # Answers are bytes, also where the URL, as one of another program, asks for text.
    options = {**_limits(_TIMEOUT), **files, **target.options, "decode_responses": False}
    if target.has_tls:
        options["connection_class"] = _TlsConnection
    match target.layout:
        case RedisLayout.STANDALONE:
            return _Pooled(ConnectionPool(**options))
        case RedisLayout.SENTINEL:
            return _WatchedBySentinels(_sentinel_pool(target, options, files))
        case RedisLayout.CLUSTER:
            return _Cluster(target, options)


class _TlsConnection(SSLConnection):
    """Reads its files whenever it connects. redis-py's own reads them once, and connects again and again."""

    async def _connect(self) -> None:
        self.ssl_context.context = None
        # Else OpenSSL asks for the password of a changed key on the terminal, and the process waits.
        self.ssl_context.password = self.ssl_context.password or no_password  # type: ignore[assignment]
        await super()._connect()  # type: ignore[no-untyped-call]


class _PrimaryTlsConnection(SentinelManagedConnection, _TlsConnection):
    """The same to the primary that sentinels name."""


def _limits(timeout: float) -> dict[str, Any]:
    return {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0)}


class _Pooled:
    """Connections of one pool, to one server."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.client = Redis.from_pool(pool)
        self.max_connections = pool.max_connections

    def node_of(self, key: str) -> object:
        return None  # a server that was restarted lacks the script

    def follow_primary(self) -> None:
        pass

    async def memory_info(self, key: str) -> Mapping[str, Any]:
        info: Mapping[str, Any] = await self.client.info("memory")
        return info

    async def hang_up(self) -> None:
        await self.client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await self.client.aclose()


class _WatchedBySentinels(_Pooled):
    """Connections to the primary that sentinels name.

    A primary that was replaced in a planned failover serves for 8 to 18 s on, and then loses what it wrote: so the
    sentinels are asked again and again. And the pool replaces a connection that has broken while it was not in use,
    without a failed call: so the address is compared.
    """

    def __init__(self, pool: SentinelConnectionPool) -> None:
        super().__init__(pool)
        self._pool = pool
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def node_of(self, key: str) -> object:
        return self._pool.master_address

    def follow_primary(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _LOOK_INTERVAL and (self._asking is None or self._asking.done()):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask_sentinels())

    async def _ask_sentinels(self) -> None:
        before = self._pool.master_address
        with suppress(RedisError):  # the connections that there are may be used on
            # It closes connections to another one that are not in use.
            now = await self._pool.get_master_address()  # type: ignore[no-untyped-call]
            if now != before:
                await self._pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await super().close()
        await self._pool.sentinel_manager.aclose()


def _sentinel_pool(target: RedisTarget, options: Mapping[str, Any], files: Mapping[str, Any]) -> SentinelConnectionPool:
    """Connections to the primary. A new one asks the sentinels, and closes the idle ones to another server."""
    of_sentinels = {
        "connection_class": _TlsConnection if target.has_tls else Connection,
        **_limits(_SENTINEL_TIMEOUT),
        **files,
        **target.sentinel_options,
    }
    sentinels = _Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **of_sentinels)) for host, port in target.addresses
    ]
    kind = _PrimaryTlsConnection if target.has_tls else SentinelManagedConnection
    of_servers = {**options, "connection_class": kind}
    return SentinelConnectionPool(target.service, sentinels, **of_servers)  # type: ignore[no-untyped-call]


class _Sentinels(Sentinel):
    """The sentinel that answered last is asked first. redis-py's own loses one where two answer at the same time."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Address of the primary. Raises MasterNotFoundError, which says why each sentinel does not name it."""
        reasons = []
        for sentinel in list(self.sentinels):
            try:
                states: Any = await sentinel.sentinel_masters()
            except (RedisConnectionError, RedisTimeoutError) as error:
                reason = str(error)
            else:
                state = states.get(service_name)
                if state and self.check_master_state(state, service_name):
                    self.sentinels.sort(key=lambda other: other is not sentinel)
                    return state["ip"], state["port"]
                reason = "has no primary of it that is up"
            options = sentinel.connection_pool.connection_kwargs
            reasons.append(f"{options['host']}:{options['port']} ({reason})")
        raise MasterNotFoundError(f"no sentinel names a primary of {service_name!r}: {', '.join(reasons)}")


class _Cluster:
    """Connections to a cluster. All keys of a deployment have one hash tag, and so are at one node."""

    def __init__(self, target: RedisTarget, options: Mapping[str, Any]) -> None:
        of_nodes = {name: value for name, value in options.items() if name not in ("connection_class", "db")}
        self.client = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in target.addresses], ssl=target.has_tls, **of_nodes
        )
        if target.has_tls:
            self.client.connection_kwargs["connection_class"] = _TlsConnection  # of nodes that it finds later
            for node in self.client.startup_nodes:
                node.connection_class = _TlsConnection
        self.max_connections = int(options.get("max_connections") or _MANY)

    def node_of(self, key: str) -> object:
        nodes = self.client.nodes_manager.slots_cache.get(self.client.keyslot(key))
        return nodes[0].name if nodes else None

    def follow_primary(self) -> None:
        pass  # nodes redirect commands

    async def memory_info(self, key: str) -> Mapping[str, Any]:
        await self.client.initialize()
        node = self.client.get_node_from_key(key)
        info: Mapping[str, Any] = await self.client.info("memory", target_nodes=node)
        return info

    async def hang_up(self) -> None:
        for node in self.client.get_nodes():
            await node.disconnect_free_connections()

    async def close(self) -> None:
        await self.client.aclose()
        # That closes nothing after a call that failed, until the next one has asked which nodes there are.
        for nodes in ("nodes_cache", "startup_nodes"):
            await self.client.nodes_manager.aclose(nodes)
