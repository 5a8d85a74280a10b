"""Authentication: API keys from a file, each with its tenant. Without a file every caller is tenant `default`."""

import hashlib
import hmac
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svc_common.errors import QuireError, Reason
from svc_common.keys import DEFAULT_TENANT_NAME

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_ENTRY_NAMES = {"key", "sha256", "tenant", "weight"}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, and its weight in the fair share of tokens."""

    name: str
    weight: float = 1.0


DEFAULT_TENANT = Tenant(DEFAULT_TENANT_NAME)


class InvalidKeyFile(Exception):  # noqa: N818
    """A file of keys that cannot be used. The text is for the operator and holds no key."""


class Authenticator:
    """Turns an authorization header into a tenant."""

    def __init__(self, tenants_by_digest: Sequence[tuple[bytes, Tenant]] | None) -> None:
        """Takes SHA-256 digests of keys; with None no key is required."""
        self._tenants_by_digest = tenants_by_digest

    @classmethod
    def from_file(cls, path: Path | None) -> "Authenticator":
        """Reads `[[keys]]` tables of a TOML file: `key` or `sha256` (hex), `tenant`, and `weight` if it is not 1.

        Raises InvalidKeyFile.
        """
        if path is None:
            return cls(None)
        try:
            entries = tomllib.loads(path.read_text()).get("keys")
        except (OSError, ValueError) as error:
            raise InvalidKeyFile(f"{path}: {error}") from error
        if not isinstance(entries, list) or not entries:
            raise InvalidKeyFile(f"{path}: there is no [[keys]] table")
        read = [_entry(f"{path}: keys[{index}]", entry) for index, entry in enumerate(entries)]
        if len({digest for digest, _ in read}) < len(read):
            raise InvalidKeyFile(f"{path}: a key stands there twice")
        return cls(read)

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of a `Bearer …` header. Raises QuireError UNAUTHENTICATED."""
        if self._tenants_by_digest is None:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise QuireError(Reason.UNAUTHENTICATED, "an API key is required: authorization: Bearer …")
        digest = _digest(key.strip())
        found = None
        # Every entry is compared, so that the time taken does not depend on the key.
        for known, tenant in self._tenants_by_digest:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise QuireError(Reason.UNAUTHENTICATED, "the API key is not known")
        return found


def _entry(where: str, entry: Any) -> tuple[bytes, Tenant]:
    if not isinstance(entry, dict):
        raise InvalidKeyFile(f"{where} is not a table")
    if unknown := sorted(set(entry) - _ENTRY_NAMES):
        raise InvalidKeyFile(f"{where} has the unknown entry {unknown[0]}")
    key, sha256 = entry.get("key"), entry.get("sha256")
    if (key is None) == (sha256 is None):
        raise InvalidKeyFile(f"{where} needs either key or sha256")
    if key is not None and (not isinstance(key, str) or not key or key != key.strip()):
        raise InvalidKeyFile(f"{where}.key is not a string without spaces around it")
    if sha256 is not None and (not isinstance(sha256, str) or not _SHA256.fullmatch(sha256)):
        raise InvalidKeyFile(f"{where}.sha256 is not 64 hexadecimal digits")
    tenant, weight = entry.get("tenant"), entry.get("weight", 1.0)
    if not isinstance(tenant, str) or not tenant:
        raise InvalidKeyFile(f"{where}.tenant is not a name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise InvalidKeyFile(f"{where}.weight is not a positive number")
    digest = _digest(key) if key is not None else bytes.fromhex(str(sha256))
    return digest, Tenant(tenant, float(weight))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
