"""Checks of certificates: expiry, roles, and whether peers accept them."""

from pathlib import Path

import pytest

from certificates import Authority, Certificate
from svc_common.addresses import HostPort
from svc_common.doctor.certificates import check_expiry
from svc_common.doctor.credentials import check_credentials, check_role_certificate
from svc_common.doctor.findings import Finding, Status
from svc_common.identity import make_secret
from svc_common.service_roles import ServiceRole
from svc_common.settings import InnerSettings


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def role_finding(role: ServiceRole, made: Certificate, ca: Path | None = None) -> Finding:
    (finding,) = check_role_certificate(role, made.certificate, made.key, ca or made.ca)
    return finding


@pytest.mark.parametrize(
    ("days", "status", "words"),
    [(0, Status.WRONG, "certificate has expired"), (2, Status.WARNING, "it expires in 2 days"), (40, Status.OK, "")],
)
def test_expiry(authority: Authority, days: int, status: Status, words: str) -> None:
    made = authority.issue(f"host-{days}", ["DNS:host"], days)
    (finding,) = check_expiry("QUIRE_TLS_CERT_FILE", made.certificate, made.key)
    assert (finding.status, words in finding.problem) == (status, True)
    assert str(made.certificate) in finding.found


def test_the_certificate_of_a_role(authority: Authority, tmp_path: Path) -> None:
    worker = authority.issue_for(ServiceRole.WORKER, days=2)
    assert role_finding(ServiceRole.WORKER, worker).status is Status.WARNING  # it expires in two days
    assert (
        "quire://role/gateway, once; its URIs: quire://role/worker" in role_finding(ServiceRole.GATEWAY, worker).problem
    )
    nameless = authority.issue("nameless", ["URI:quire://role/scheduler"])
    assert "DNS name scheduler.quire.internal" in role_finding(ServiceRole.SCHEDULER, nameless).problem
    other = Authority(tmp_path / "other-ca").certificate
    assert "refuse it" in role_finding(ServiceRole.WORKER, worker, other).problem


def test_the_secret_and_what_is_dialled(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)
    settings = InnerSettings.model_validate({"deployment_secret_file": secret})
    (fine,) = check_credentials(ServiceRole.GATEWAY, settings, (), [HostPort("127.0.0.1", 1)], "QUIRE_SCHEDULERS_AT")
    assert fine.status is Status.OK
    (far,) = check_credentials(ServiceRole.GATEWAY, settings, (), [HostPort("192.0.2.1", 1)], "QUIRE_SCHEDULERS_AT")
    assert (far.status, "QUIRE_SCHEDULERS_AT" in far.problem) == (Status.WRONG, True)
    (insecure,) = check_credentials(ServiceRole.GATEWAY, InnerSettings.model_validate({"insecure": True}))
    assert insecure.status is Status.WARNING
    secret.chmod(0o644)
    (readable,) = check_credentials(ServiceRole.GATEWAY, settings)
    assert (readable.status, "chmod" in readable.problem) == (Status.WRONG, True)
