"""The TOML file of API keys and of rules for tokens, which is read again when it changes."""

import hashlib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gateway_svc.key_tables import ALLOWANCE_FIELDS, LIMIT_FIELDS, InvalidKeyFile, Table, read_allowance
from gateway_svc.tenant import AccountLimits, Tenant
from gateway_svc.web_tokens import SigningKeys, TokenRules, TokenVerifier, read_token_rules
from svc_common.files import ReloadedFile, why_unreadable

MIN_KEY_LENGTH = 16
"""Characters that a key has at least, where the file has the key itself."""

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")
_FIELDS = {"key", "sha256", "tenant", "name", "expires", *ALLOWANCE_FIELDS}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its SHA-256 digest. From `expires` on, in seconds since 1970, it is refused; None: never."""

    digest: bytes
    tenant: Tenant
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class KeyFileContents:
    """The keys of a file, and its rules for tokens, if it has any."""

    keys: Sequence[ApiKey]
    token_rules: TokenRules | None = None


@dataclass(frozen=True, slots=True)
class _InUse:
    """The keys of a file, and what verifies tokens, if any are accepted."""

    keys: Sequence[ApiKey]
    verifier: TokenVerifier | None


class KeyFile:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidKeyFile."""
        self._file = ReloadedFile(path, "API keys", _read_for_use, InvalidKeyFile)

    @property
    def keys(self) -> Sequence[ApiKey]:
        """The keys that were last read."""
        return self._file.current.keys

    @property
    def verifier(self) -> TokenVerifier | None:
        """Verifies tokens; None where none are accepted."""
        return self._file.current.verifier

    def refresh(self) -> None:
        """Reads the file if it has changed. If it cannot be used, this is logged, and the earlier keys stay."""
        self._file.refresh()

    def refresh_signing_keys(self) -> None:
        """Reads the keys that tokens are verified by, if they may have changed."""
        if self.verifier is not None:
            self.verifier.signing_keys.refresh()


def _read_for_use(path: Path, before: _InUse | None) -> _InUse:
    contents = read_key_file(path)
    return _InUse(contents.keys, _verifier_of(contents, None if before is None else before.verifier))


def _verifier_of(contents: KeyFileContents, before: TokenVerifier | None) -> TokenVerifier | None:
    """A verifier for a file. It keeps the signing keys of the one before, if they are at the same place."""
    rules = contents.token_rules
    if rules is None:
        return None
    if before is not None and before.rules.jwks == rules.jwks:
        return TokenVerifier(rules, before.signing_keys)
    return TokenVerifier(rules, SigningKeys(rules.jwks))


def read_key_file(path: Path) -> KeyFileContents:
    """The contents of a file. Raises InvalidKeyFile, which names the file, the key's index and the field."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidKeyFile(f"{path}: {why_unreadable(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidKeyFile(f"{path}: {error}") from error
    if unknown := sorted(set(tables) - {"keys", "jwt"}):
        raise InvalidKeyFile(f"{path}: there is the unknown table {unknown[0]}")
    entries = tables.get("keys", [] if "jwt" in tables else None)
    if not isinstance(entries, list) or not (entries or "jwt" in tables):
        raise InvalidKeyFile(f"{path}: there is no [[keys]] table")
    rules = read_token_rules(f"{path}: jwt", tables["jwt"], path.parent) if "jwt" in tables else None
    keys = [_read(Table(f"{path}: keys[{index}]", entry, _FIELDS)) for index, entry in enumerate(entries)]
    _check_accounts(path, keys)
    return KeyFileContents(keys, rules)


def _check_accounts(path: Path, keys: Sequence[ApiKey]) -> None:
    """Rejects a key that is there twice, keys of one tenant with different weights, and keys of one account with
    different limits.
    """
    by_digest: dict[bytes, int] = {}
    by_tenant: dict[str, tuple[int, float]] = {}
    by_account: dict[str, tuple[int, AccountLimits]] = {}
    for index, key in enumerate(keys):
        if (first := by_digest.setdefault(key.digest, index)) != index:
            raise InvalidKeyFile(f"{path}: keys[{index}] is the same key as keys[{first}]")
        first, weight = by_tenant.setdefault(key.tenant.name, (index, key.tenant.weight))
        if key.tenant.weight != weight:
            raise InvalidKeyFile(
                f"{path}: keys[{index}].weight differs from keys[{first}].weight: the weight is the tenant's"
            )
        limits = key.tenant.limits
        assert limits is not None
        first, others = by_account.setdefault(limits.account, (index, limits))
        if different := [name for name in LIMIT_FIELDS if getattr(limits, name) != getattr(others, name)]:
            here, there = (f"keys[{each}].{different[0]}" for each in (index, first))
            raise InvalidKeyFile(
                f"{path}: {here} differs from {there}: keys of the same tenant and name share their limits"
            )


def _read(entry: Table) -> ApiKey:
    caller = read_allowance(entry, entry.text("tenant"), entry.name("name") or "")
    return ApiKey(_digest(entry), caller, _expires(entry))


def _digest(entry: Table) -> bytes:
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


def _expires(entry: Table) -> float | None:
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
