"""Authentication: the API key of a call leads to its tenant. Without a key file every caller is tenant `default`."""

import hmac
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

from gateway_svc.key_file import ApiKey, digest_of, read_key_file
from gateway_svc.tenant import DEFAULT_TENANT, Tenant
from svc_common.errors import QuireError, Reason

CREDENTIAL_HEADERS = ("authorization", "x-api-key", "api-key")
"""Headers over HTTP, and metadata over gRPC, that a key may be in: as `Bearer …` in the first, else as it is."""


class LoginFailure(StrEnum):
    """Why a call is not authenticated."""

    MISSING = "missing"
    MALFORMED = "malformed"
    CONFLICTING = "conflicting"
    UNKNOWN = "unknown"
    EXPIRED = "expired"


_MESSAGES = {
    LoginFailure.MISSING: "an API key is required: authorization: Bearer …",
    LoginFailure.MALFORMED: "an API key is required: authorization: Bearer …, and authorization has something else",
    LoginFailure.CONFLICTING: "the call has two different API keys",
    LoginFailure.UNKNOWN: "the API key is not known",
    LoginFailure.EXPIRED: "the API key has expired",
}


class LoginRefused(QuireError):  # noqa: N818
    """A call without a valid credential."""

    def __init__(self, failure: LoginFailure) -> None:
        super().__init__(Reason.UNAUTHENTICATED, _MESSAGES[failure])
        self.failure = failure


class Authenticator:
    """Turns a call's credentials into a tenant."""

    def __init__(self, keys: Sequence[ApiKey] | None, clock: Callable[[], float] = time.time) -> None:
        """With None no key is required. `clock` is in seconds since 1970."""
        self._keys = keys
        self._clock = clock

    @classmethod
    def from_file(cls, path: Path | None) -> "Authenticator":
        """Takes the keys of a file; None: no key is required. Raises InvalidKeyFile."""
        return cls(None if path is None else read_key_file(path))

    def tenant(self, credentials: Sequence[tuple[str, str]]) -> Tenant:
        """The tenant of a call with these CREDENTIAL_HEADERS, in lower case, and their values. Raises LoginRefused."""
        if self._keys is None:
            return DEFAULT_TENANT
        digest = digest_of(_key_of(credentials))
        found = None
        # Every key is compared, so that the time taken does not depend on the key.
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise LoginRefused(LoginFailure.UNKNOWN)
        if found.expires is not None and self._clock() >= found.expires:
            raise LoginRefused(LoginFailure.EXPIRED)
        return found.tenant


def _key_of(credentials: Sequence[tuple[str, str]]) -> str:
    """The one key of a call. Raises LoginRefused."""
    keys = {_bearer(value) if header == "authorization" else value.strip() for header, value in credentials} - {""}
    if not keys:
        raise LoginRefused(LoginFailure.MISSING)
    if len(keys) > 1:
        raise LoginRefused(LoginFailure.CONFLICTING)
    return keys.pop()


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.strip().partition(" ")
    if scheme and (scheme.lower() != "bearer" or not key.strip()):
        raise LoginRefused(LoginFailure.MALFORMED)
    return key.strip()
