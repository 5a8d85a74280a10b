"""Failed logins are counted, and logged at most once in a while."""

import logging
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway_svc.auth import Authenticator
from gateway_svc.failed_logins import LOG_SECONDS, FailedLogins, LoginFailure, LoginRefused
from gateway_svc.key_file import ApiKey, digest_of
from gateway_svc.tenant import AccountLimits, Tenant


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def failed_logins(registry: CollectorRegistry, times: Iterator[float]) -> FailedLogins:
    return FailedLogins(Counter("failed", "", ["protocol", "reason"], registry=registry), lambda: next(times))


def test_each_failure_is_counted_and_few_are_logged(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 1.0, LOG_SECONDS - 0.1, LOG_SECONDS, LOG_SECONDS + 1, 100.0])
    failures = failed_logins(registry, times)
    with caplog.at_level(logging.WARNING, logger="quire.gateway"):
        for _ in range(5):
            failures.note("http", LoginRefused(LoginFailure.UNKNOWN), "10.0.0.1:1234")
        failures.note("grpc", LoginRefused(LoginFailure.EXPIRED, account="a/batch"), "ipv4:10.0.0.2:99")
    lines = [(each.num_failed, each.protocol, each.reason, each.peer) for each in caplog.records]  # type: ignore[attr-defined]
    assert lines == [
        (1, "http", "unknown", "10.0.0.1:1234"),
        (3, "http", "unknown", "10.0.0.1:1234"),
        (2, "grpc", "expired", "ipv4:10.0.0.2:99"),
    ]
    assert caplog.records[-1].account == "a/batch"  # type: ignore[attr-defined]
    counted = [("http", "unknown"), ("grpc", "expired"), ("http", "expired")]
    values = [registry.get_sample_value("failed_total", {"protocol": p, "reason": r}) for p, r in counted]
    assert values == [5.0, 1.0, None]


def test_a_login_that_fails_is_logged_without_its_key(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    class Keys:
        keys = (ApiKey(digest_of("the-old-key"), Tenant("a", limits=AccountLimits("a/old")), expires=5.0),)
        verifier = None

    authenticator = Authenticator(Keys(), failed_logins(registry, iter([0.0, 100.0])), lambda: 5.0)
    with caplog.at_level(logging.WARNING, logger="quire.gateway"):
        for key in ("the-old-key", "another-key"):
            with pytest.raises(LoginRefused):
                authenticator.login([("x-api-key", key)], "http", "peer")
            with pytest.raises(LoginRefused):
                authenticator.tenant([("x-api-key", key)])
    assert [each.reason for each in caplog.records] == ["expired", "unknown"]  # type: ignore[attr-defined]
    assert caplog.records[0].account == "a/old"  # type: ignore[attr-defined]
    assert "-key" not in str([vars(each) for each in caplog.records])
