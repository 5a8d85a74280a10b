"""Checks of how a service proves its role to others: by the deployment's secret, or by a certificate."""

import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

from svc_common.addresses import HostPort
from svc_common.doctor.certificates import expiry_of, present, why_refused
from svc_common.doctor.findings import Finding, ok, warning, wrong
from svc_common.identity import InvalidCredentials
from svc_common.inner_ports import check_dialled, identity_of
from svc_common.mutual_tls import ROLE_URI, role_in, server_name
from svc_common.service_roles import ServiceRole
from svc_common.settings import InnerSettings

_ISSUE = "issue it as docs/operations.md, Mutual TLS, describes"


def check_credentials(
    role: ServiceRole,
    settings: InnerSettings,
    listens_on: Sequence[str] = (),
    dials: Sequence[HostPort] = (),
    dial_setting: str = "",
) -> Iterator[Finding]:
    """Findings about the credentials of a service that listens on hosts and dials addresses of a setting."""
    try:
        identity = identity_of(role, settings, listens_on)
        check_dialled(identity, dials, dial_setting)
    except InvalidCredentials as error:
        step = "correct the file or setting; docs/operations.md, Who may call what, describes both kinds of credentials"
        yield wrong(f"role {role}", str(error), step)
        return
    if settings.mtls_cert_file and settings.mtls_key_file and settings.mtls_ca_file:
        yield from check_role_certificate(role, settings.mtls_cert_file, settings.mtls_key_file, settings.mtls_ca_file)
    elif settings.insecure:
        problem = "inner ports check nobody: anyone who reaches them may call them"
        step = "unset QUIRE_INSECURE, unless a service mesh or a firewall protects these ports"
        yield warning("QUIRE_INSECURE is set", problem, step)
    else:
        yield ok(f"the deployment's secret in {settings.deployment_secret_file}")


def check_role_certificate(role: ServiceRole, certificate: Path, key: Path, ca: Path) -> Iterator[Finding]:
    """Findings about a certificate that can be loaded with its key."""
    found = f"QUIRE_MTLS_CERT_FILE: {certificate}"
    serves = role in (ServiceRole.SCHEDULER, ServiceRole.WORKER)
    try:
        accepted = present(certificate, key, ca)
    except ssl.SSLError as error:
        yield wrong(found, f"peers with the CA of {ca} refuse it: {why_refused(error)}", _ISSUE)
        return
    stated = role_in(accepted.uris)
    if stated is not role:
        names = ", ".join(accepted.uris) or "none"
        problem = f"its subject alternative name must have the URI {ROLE_URI}{role}, once; its URIs: {names}"
        yield wrong(found, problem, f"use the certificate of the {role}, or {_ISSUE}")
    elif serves and server_name(role) not in accepted.dns_names:
        names = ", ".join(accepted.dns_names) or "none"
        problem = f"its subject alternative name must have the DNS name {server_name(role)}; its DNS names: {names}"
        yield wrong(found, problem, _ISSUE)
    else:
        yield expiry_of("QUIRE_MTLS_CERT_FILE", certificate, accepted)
