"""Settings of a Redis: its URL, whose password is not part of any representation or error, and the prefix of keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode, urlsplit

from pydantic import AfterValidator, Secret, StringConstraints
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.exceptions import RedisError

from svc_common.redaction import redact

DEFAULT_PREFIX = "quire"
PREFIX = (
    "prefix of all keys in Redis, as {quire}:lease, of letters, digits and _.:-; deployments that share a Redis need "
    "different ones"
)
"""The description of the setting."""
RedisPrefix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
"""The hash tag of all keys of a deployment."""

_RULES = (
    "not a URL of a Redis, such as redis://host:6379/0, redis+sentinel://host:26379,host:26379/service/0 or "
    "redis+cluster://host:6379,host:6379; a password is :password@ before the host, with its special characters "
    "percent-encoded; with TLS the URL begins with rediss; timeouts are above 0"
)
_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
_SENTINEL_CREDENTIALS = ("sentinel_username", "sentinel_password")


class RedisLayout(Enum):
    """How the servers that a URL names belong together."""

    STANDALONE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """What a URL names: servers of a cluster, or the sentinels of a `service`; a standalone server is in `options`.

    `options` are arguments of redis-py's connections to servers, `sentinel_options` those to sentinels.
    """

    layout: RedisLayout
    options: Mapping[str, Any]
    addresses: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_tls(self) -> bool:
        return self.options.get("connection_class") is SSLConnection

    @classmethod
    def parse(cls, url: str) -> "RedisTarget":
        """Raises ValueError. Nothing is resolved or connected."""
        parts = urlsplit(url)
        kind, _, layout_name = parts.scheme.partition("+")
        layout = RedisLayout(layout_name)
        is_socket = kind == "unix" and layout is RedisLayout.STANDALONE
        # An "@" behind the host is the end of a password with a "/" or "?".
        if parts.fragment or (not is_socket and (kind not in ("redis", "rediss") or "@" in parts.path + parts.query)):
            raise ValueError(_RULES)
        if layout is RedisLayout.STANDALONE:
            return cls(layout, _options(url))
        login, at, hosts = parts.netloc.rpartition("@")
        addresses = tuple(
            _address(host, 26379 if layout is RedisLayout.SENTINEL else 6379) for host in hosts.split(",")
        )
        service, database = "", parts.path.strip("/")
        if layout is RedisLayout.SENTINEL:
            service, _, database = database.partition("/")
        if bool(service) is not (layout is RedisLayout.SENTINEL) or (
            layout is RedisLayout.CLUSTER and database not in ("", "0")
        ):
            raise ValueError(_RULES)
        if database and not database.isdecimal():
            raise ValueError(_RULES)
        query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        of_sentinels = {name: query.pop(name)[0] for name in _SENTINEL_CREDENTIALS if name in query}
        if of_sentinels and layout is RedisLayout.CLUSTER:
            raise ValueError(_RULES)
        options = dict(_options(f"{kind}://{login}{at}host/{database}?{urlencode(query, doseq=True)}"))
        for name in ("host", "port"):
            options.pop(name, None)
        shared = {name: value for name, value in options.items() if name.startswith("ssl_")}
        sentinel_options = shared | {name.removeprefix("sentinel_"): value for name, value in of_sentinels.items()}
        return cls(layout, options, addresses, service, sentinel_options)


def _options(url: str) -> Mapping[str, Any]:
    """The arguments of connections to a standalone server. Raises ValueError."""
    options: Mapping[str, Any] = parse_url(url)
    try:
        ConnectionPool(**options).make_connection()  # type: ignore[no-untyped-call]  # it does not connect
    except (TypeError, AttributeError, RedisError):  # an unknown parameter, or a value that it cannot have
        raise ValueError(_RULES) from None
    for name in _TIMEOUTS:
        seconds = options.get(name, 1.0)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(_RULES)  # every call would time out
    return options


def _address(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError(_RULES)
    return parts.hostname, parts.port or default_port


def _check(url: str) -> str:
    try:
        RedisTarget.parse(url)
    except ValueError:
        raise ValueError(_RULES) from None
    return url


class RedisUrl(Secret[Annotated[str, AfterValidator(_check)]]):
    """A valid URL. `str` and `repr` have it without user and password, `get_secret_value()` as it was given."""

    @property
    def target(self) -> RedisTarget:
        return RedisTarget.parse(self.get_secret_value())

    def _display(self) -> str:
        return redact(self.get_secret_value())
