"""Settings of a Redis: its URL, whose password is not part of any representation or error, and the prefix of keys."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Secret, StringConstraints
from redis.asyncio import ConnectionPool

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
    "not a URL of a Redis, such as redis://:password@host:6379/0; the scheme is redis, rediss or unix, and special "
    "characters of a password are percent-encoded"
)


def _check(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("redis", "rediss", "unix") and not parts.fragment
        # An "@" behind the host is the end of a password with a "/" or "?".
        is_whole = is_whole and (parts.scheme == "unix" or "@" not in parts.path + parts.query)
        if is_whole:
            ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # it does not connect
    except (ValueError, TypeError):  # TypeError: an unknown parameter
        is_whole = False
    if not is_whole:
        raise ValueError(_RULES)
    return url


class RedisUrl(Secret[Annotated[str, AfterValidator(_check)]]):
    """A valid URL. `str` and `repr` have it without user and password, `get_secret_value()` as it was given."""

    def _display(self) -> str:
        return redact(self.get_secret_value())
