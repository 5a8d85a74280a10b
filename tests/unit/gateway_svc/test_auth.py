"""Credentials of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway_svc.auth import Authenticator
from gateway_svc.failed_logins import FailedLogins, LoginFailure, LoginRefused
from gateway_svc.key_file import ApiKey, digest_of
from gateway_svc.tenant import DEFAULT_TENANT, AccountLimits, Tenant
from gateway_svc.web_tokens import SigningKeys, TokenRules, TokenVerifier
from svc_common.errors import Reason
from token_issuer import AUDIENCE, ISSUER, TokenIssuer

NOW = 1_000_000.0
ALICE, BOB = Tenant("alice", 2.0), Tenant("bob")
KEYS = [
    ApiKey(digest_of("first-key"), ALICE),
    ApiKey(digest_of("second-key"), BOB, expires=NOW + 0.5),
    ApiKey(digest_of("old-key"), BOB, expires=NOW),
]


@dataclass(frozen=True)
class Keys:
    keys: list[ApiKey]
    verifier: TokenVerifier | None = None


class ChangingKeys:
    """Keys whose rules for tokens are removed by another thread as soon as they were read."""

    keys: Sequence[ApiKey] = ()

    def __init__(self, verifier: TokenVerifier) -> None:
        self._verifier: TokenVerifier | None = verifier

    @property
    def verifier(self) -> TokenVerifier | None:
        verifier, self._verifier = self._verifier, None
        return verifier


def failures() -> FailedLogins:
    return FailedLogins(Counter("failed", "", ["protocol", "reason"], registry=CollectorRegistry()))


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(Keys(KEYS), failures(), lambda: NOW)


@pytest.mark.parametrize(
    ("credentials", "tenant"),
    [
        ([("authorization", "Bearer first-key")], ALICE),
        ([("authorization", "bearer  first-key ")], ALICE),
        ([("x-api-key", "first-key")], ALICE),
        ([("api-key", "first-key")], ALICE),
        ([("authorization", "Bearer second-key"), ("x-api-key", "second-key"), ("api-key", " second-key")], BOB),
        ([("authorization", ""), ("x-api-key", "first-key"), ("api-key", "")], ALICE),
    ],
    ids=range(6),
)
def test_a_key_leads_to_its_tenant(
    authenticator: Authenticator, credentials: list[tuple[str, str]], tenant: Tenant
) -> None:
    assert authenticator.tenant(credentials) == tenant


@pytest.mark.parametrize(
    ("credentials", "failure"),
    [
        ([], LoginFailure.MISSING),
        ([("authorization", "")], LoginFailure.MISSING),
        ([("x-api-key", " ")], LoginFailure.MISSING),
        ([("authorization", "first-key")], LoginFailure.MALFORMED),
        ([("authorization", "Bearer")], LoginFailure.MALFORMED),
        ([("authorization", "Bearer ")], LoginFailure.MALFORMED),
        ([("authorization", "Basic first-key")], LoginFailure.MALFORMED),
        ([("authorization", "Basic first-key"), ("x-api-key", "first-key")], LoginFailure.MALFORMED),
        ([("authorization", "Bearer first-key"), ("x-api-key", "second-key")], LoginFailure.CONFLICTING),
        ([("x-api-key", "first-key"), ("api-key", "x")], LoginFailure.CONFLICTING),
        ([("authorization", "Bearer first-key"), ("authorization", "Bearer second-key")], LoginFailure.CONFLICTING),
        ([("authorization", "Bearer x")], LoginFailure.UNKNOWN),
        ([("x-api-key", "Bearer first-key")], LoginFailure.UNKNOWN),
        ([("api-key", "first-key\udcff")], LoginFailure.UNKNOWN),
        ([("x-api-key", "old-key")], LoginFailure.EXPIRED),
    ],
    ids=range(15),
)
def test_anything_else_is_refused(
    authenticator: Authenticator, credentials: list[tuple[str, str]], failure: LoginFailure
) -> None:
    with pytest.raises(LoginRefused) as refusal:
        authenticator.tenant(credentials)
    assert (refusal.value.failure, refusal.value.reason) == (failure, Reason.UNAUTHENTICATED)
    assert "-key" not in str(refusal.value).replace("x-api-key", "")


def test_without_a_file_everyone_is_the_default_tenant() -> None:
    authenticator = Authenticator(None, failures())
    for credentials in ([], [("authorization", "Basic x"), ("x-api-key", "y")]):
        assert authenticator.tenant(credentials) == DEFAULT_TENANT == Tenant("default")


def test_rules_for_tokens_that_are_removed_during_a_call_still_verify_it(tmp_path: Path) -> None:
    issuer, path = TokenIssuer(), tmp_path / "jwks.json"
    path.write_text(issuer.key_set())
    rules = TokenRules(ISSUER, AUDIENCE, str(path), "tenant", None, {"": Tenant("", limits=AccountLimits(""))})
    authenticator = Authenticator(ChangingKeys(TokenVerifier(rules, SigningKeys(str(path)))), failures())
    token = [("authorization", f"Bearer {issuer.token()}")]
    assert authenticator.tenant(token).name == "search"
    with pytest.raises(LoginRefused):
        authenticator.tenant(token)
