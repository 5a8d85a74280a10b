"""Authentication: a call's API key or token leads to its tenant. Without a key file all are tenant `default`."""

import hmac
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway_svc.failed_logins import FailedLogins, LoginFailure, LoginRefused
from gateway_svc.key_file import ApiKey, digest_of
from gateway_svc.tenant import DEFAULT_TENANT, Tenant
from gateway_svc.web_tokens import TokenVerifier

CREDENTIAL_HEADERS = ("Authorization", "x-api-key", "api-key")
"""Headers over HTTP, and metadata over gRPC, for a key or token: `Bearer …` in the first, else the key as it is."""


class KeySource(Protocol):
    """The keys that are valid now, and what verifies tokens, if they are accepted."""

    @property
    def keys(self) -> Sequence[ApiKey]: ...

    @property
    def verifier(self) -> TokenVerifier | None: ...


class Authenticator:
    """Turns a call's credentials into a tenant."""

    def __init__(
        self, source: KeySource | None, failures: FailedLogins, clock: Callable[[], float] = time.time
    ) -> None:
        """With None no key is required. `clock` is in seconds since 1970."""
        self._source = source
        self._failures = failures
        self._clock = clock

    @property
    def requires_credential(self) -> bool:
        """Whether calls need a key or token."""
        return self._source is not None

    def login(self, credentials: Sequence[tuple[str, str]], protocol: str, peer: str) -> Tenant:
        """The same as `tenant`, for a call of a client at `peer` that is to be answered: failures are counted."""
        try:
            return self.tenant(credentials)
        except LoginRefused as refusal:
            self._failures.note(protocol, refusal, peer)
            raise

    def tenant(self, credentials: Sequence[tuple[str, str]]) -> Tenant:
        """The tenant of a call with these CREDENTIAL_HEADERS and their values. Raises LoginRefused."""
        if self._source is None:
            return DEFAULT_TENANT
        credential = _credential(credentials)
        digest = digest_of(credential)
        found = None
        # Every key is compared, so that the time taken does not depend on the key.
        for known in self._source.keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        verifier = self._source.verifier  # read once: another thread may change it
        if found is None and verifier is not None and credential.count(".") == 2:
            return verifier.tenant(credential)
        if found is None:
            raise LoginRefused(LoginFailure.UNKNOWN)
        if found.expires is not None and self._clock() >= found.expires:
            limits = found.tenant.limits
            raise LoginRefused(LoginFailure.EXPIRED, account=None if limits is None else limits.account)
        return found.tenant


def _credential(credentials: Sequence[tuple[str, str]]) -> str:
    """The one key or token of a call. Raises LoginRefused."""
    keys = {_bearer(value) if header.lower() == "authorization" else value.strip() for header, value in credentials} - {
        ""
    }
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
