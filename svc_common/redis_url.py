"""The URL of a Redis, as a setting. Its password is not part of any representation or error."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Secret
from redis.asyncio import ConnectionPool

from svc_common.redaction import redact

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
