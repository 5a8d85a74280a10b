"""Authentication: the API key of a call leads to its tenant. Without a key file every caller is tenant `default`."""

import hmac
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway_svc.failed_logins import FailedLogins, LoginFailure
from gateway_svc.key_file import ApiKey, digest_of
from gateway_svc.tenant import DEFAULT_TENANT, Tenant
from svc_common.errors import QuireError, Reason

CREDENTIAL_HEADERS = ("authorization", "x-api-key", "api-key")
"""Headers over HTTP, and metadata over gRPC, that a key may be in: as `Bearer …` in the first, else as it is."""


_MESSAGES = {
    LoginFailure.MISSING: "an API key is required: authorization: Bearer …",
    LoginFailure.MALFORMED: "an API key is required: authorization: Bearer …, and authorization has something else",
    LoginFailure.CONFLICTING: "the call has two different API keys",
    LoginFailure.UNKNOWN: "the API key is not known",
    LoginFailure.EXPIRED: "the API key has expired",
}


class LoginRefused(QuireError):  # noqa: N818
    """A call without a valid credential. `account` is that of its key, where the key is known."""

    def __init__(self, failure: LoginFailure, account: str | None = None) -> None:
        super().__init__(Reason.UNAUTHENTICATED, _MESSAGES[failure])
        self.failure = failure
        self.account = account


class KeySource(Protocol):
    """The keys that are valid now."""

    @property
    def keys(self) -> Sequence[ApiKey]: ...


class Authenticator:
    """Turns a call's credentials into a tenant."""

    def __init__(
        self, source: KeySource | None, failures: FailedLogins, clock: Callable[[], float] = time.time
    ) -> None:
        """With None no key is required. `clock` is in seconds since 1970."""
        self._source = source
        self._failures = failures
        self._clock = clock

    def login(self, credentials: Sequence[tuple[str, str]], protocol: str, peer: str) -> Tenant:
        """The same as `tenant`, for a call of a client at `peer` that is to be answered: failures are counted."""
        try:
            return self.tenant(credentials)
        except LoginRefused as refusal:
            self._failures.note(protocol, refusal.failure, peer, refusal.account)
            raise

    def tenant(self, credentials: Sequence[tuple[str, str]]) -> Tenant:
        """The tenant of a call with these CREDENTIAL_HEADERS, in lower case, and their values. Raises LoginRefused."""
        if self._source is None:
            return DEFAULT_TENANT
        digest = digest_of(_key_of(credentials))
        found = None
        # Every key is compared, so that the time taken does not depend on the key.
        for known in self._source.keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise LoginRefused(LoginFailure.UNKNOWN)
        if found.expires is not None and self._clock() >= found.expires:
            limits = found.tenant.limits
            raise LoginRefused(LoginFailure.EXPIRED, None if limits is None else limits.account)
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
