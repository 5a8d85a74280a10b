"""The TOML file of API keys: each key's tenant, account, limits and expiry. It is read again when it changes."""

import hashlib
import logging
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gateway_svc.retention import Retention
from gateway_svc.tenant import AccountLimits, Tenant, account_name

logger = logging.getLogger("quire.gateway")

MIN_KEY_LENGTH = 16
"""Characters that a key has at least, where the file has the key itself."""

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST = 2**31 - 1
_MOST_PER_MINUTE = 2**53

_LIMITS = {
    "max_running": (1, _MOST),
    "max_queued": (1, _MOST),
    "max_kv_blocks": (1, _MOST),
    "tokens_per_minute": (1, _MOST_PER_MINUTE),
    "requests_per_minute": (1, _MOST_PER_MINUTE),
}
"""The limits that are integers, with their ranges."""

_FACTOR = "cached_token_factor"
_FIELDS = {
    "key",
    "sha256",
    "tenant",
    "name",
    "weight",
    "max_priority",
    "models",
    "retention",
    "expires",
    _FACTOR,
    *_LIMITS,
}


class InvalidKeyFile(Exception):  # noqa: N818
    """A file of keys that cannot be used. The text is for the operator and holds no key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its SHA-256 digest. From `expires` on, in seconds since 1970, it is refused; None: never."""

    digest: bytes
    tenant: Tenant
    expires: float | None = None


class KeyFile:
    """The keys of a file, which is read again when it changes. `refresh` may be called in any one thread."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidKeyFile."""
        self._path = path
        self._version = self._stat()
        self._keys = read_key_file(path)

    @property
    def keys(self) -> Sequence[ApiKey]:
        """The keys that were last read."""
        return self._keys

    def refresh(self) -> None:
        """Reads the file if it has changed. If it cannot be used, this is logged, and the earlier keys stay."""
        version = self._stat()
        if version == self._version:
            return
        try:
            keys = read_key_file(self._path)
        except InvalidKeyFile as error:
            if version == self._stat():
                self._version = version
                logger.warning(
                    "the changed file of API keys cannot be used; the earlier keys stay", extra={"why": str(error)}
                )
            return
        if version == self._stat():  # else it changes at this moment, and the next call reads it
            self._keys, self._version = keys, version
            logger.info("the file of API keys was read again", extra={"path": str(self._path), "num_keys": len(keys)})

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a file, at least one. Raises InvalidKeyFile, which names the file, the key's index and the field."""
    try:
        entries = tomllib.loads(path.read_text()).get("keys")
    except (OSError, ValueError) as error:
        raise InvalidKeyFile(f"{path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidKeyFile(f"{path}: there is no [[keys]] table")
    keys = [_read(_Entry(f"{path}: keys[{index}]", entry)) for index, entry in enumerate(entries)]
    by_digest: dict[bytes, int] = {}
    by_account: dict[str, tuple[int, AccountLimits]] = {}
    for index, key in enumerate(keys):
        if (first := by_digest.setdefault(key.digest, index)) != index:
            raise InvalidKeyFile(f"{path}: keys[{index}] is the same key as keys[{first}]")
        limits = key.tenant.limits
        assert limits is not None
        first, others = by_account.setdefault(limits.account, (index, limits))
        if different := [name for name in (*_LIMITS, _FACTOR) if getattr(limits, name) != getattr(others, name)]:
            here, there = (f"keys[{each}].{different[0]}" for each in (index, first))
            raise InvalidKeyFile(
                f"{path}: {here} differs from {there}: keys of the same tenant and name share their limits"
            )
    return keys


class _Entry:
    """A `[[keys]]` table. Errors name the field, never its value."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise InvalidKeyFile(f"{where} is not a table")
        if unknown := sorted(set(values) - _FIELDS):
            raise InvalidKeyFile(f"{where} has the unknown field {unknown[0]}")
        self.where = where
        self.values: Mapping[str, Any] = values

    def invalid(self, field: str, message: str) -> InvalidKeyFile:
        return InvalidKeyFile(f"{self.where}.{field} {message}")

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(field, f"is not an integer from {least} to {most}")
        return value

    def number(self, field: str) -> float | None:
        """A finite number, or None where there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.invalid(field, "is not a number")
        return float(value)


def _read(entry: _Entry) -> ApiKey:
    tenant = entry.values.get("tenant")
    if not isinstance(tenant, str) or not tenant:
        raise entry.invalid("tenant", "is not a name")
    weight = entry.number("weight")
    if weight is not None and not weight > 0:
        raise entry.invalid("weight", "is not above 0")
    max_priority = entry.integer("max_priority", -(2**31), _MOST)
    caller = Tenant(
        tenant,
        1.0 if weight is None else weight,
        _limits(entry, tenant),
        0 if max_priority is None else max_priority,
        _models(entry),
        _retention(entry),
    )
    return ApiKey(_digest(entry), caller, _expires(entry))


def _digest(entry: _Entry) -> bytes:
    key, sha256 = entry.values.get("key"), entry.values.get("sha256")
    if (key is None) == (sha256 is None):
        raise InvalidKeyFile(f"{entry.where} needs either key or sha256")
    if key is None:
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise entry.invalid("sha256", "is not 64 hexadecimal digits")
        return bytes.fromhex(sha256)
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise entry.invalid("key", "is not a string of ASCII characters without spaces around it")
    if len(key) < MIN_KEY_LENGTH:
        raise entry.invalid("key", f"has {len(key)} characters, and needs at least {MIN_KEY_LENGTH}")
    return digest_of(key)


def _limits(entry: _Entry, tenant: str) -> AccountLimits:
    name = entry.values.get("name")
    if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name)):
        raise entry.invalid("name", "is not 1 to 64 letters, digits, '.', '_' or '-'")
    factor = entry.number(_FACTOR)
    if factor is not None and not 0 <= factor <= 1:
        raise entry.invalid(_FACTOR, "is not from 0 to 1")
    limits = {field: entry.integer(field, *bounds) for field, bounds in _LIMITS.items()}
    return AccountLimits(account_name(tenant, name or ""), **limits, cached_token_factor=factor)


def _models(entry: _Entry) -> frozenset[str] | None:
    models = entry.values.get("models")
    if models is None:
        return None
    if not isinstance(models, list) or not models or not all(isinstance(each, str) and each for each in models):
        raise entry.invalid("models", "is not a list of one or more names")
    return frozenset(models)


def _retention(entry: _Entry) -> Retention | None:
    match entry.values.get("retention"):
        case None:
            return None
        case "none" | "until_end" as word:
            return Retention.parse(word)
        case int() as seconds if 1 <= seconds <= _MOST and not isinstance(seconds, bool):
            return Retention(is_recorded=True, seconds=seconds)
    raise entry.invalid("retention", f'is not "none", "until_end" or an integer of seconds from 1 to {_MOST}')


def _expires(entry: _Entry) -> float | None:
    expires = entry.values.get("expires")
    if expires is None:
        return None
    if isinstance(expires, str):
        try:
            expires = datetime.fromisoformat(expires)
        except ValueError:
            expires = None
    if not isinstance(expires, datetime) or expires.tzinfo is None:
        raise entry.invalid("expires", "is not a date and time with an offset, such as 2030-01-31T12:00:00Z (RFC 3339)")
    return expires.timestamp()


def digest_of(key: str) -> bytes:
    """The SHA-256 digest of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
