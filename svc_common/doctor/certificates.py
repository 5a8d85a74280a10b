"""Checks of certificates beyond what `tls_files` checks: expiry, names, and whether peers with the same CA accept them.

A TLS handshake in memory decides, with OpenSSL. HTTP and Redis use it too; gRPC uses BoringSSL, whose rules may differ.
"""

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svc_common.doctor.findings import Finding, ok, warning, wrong
from svc_common.tls_files import no_password

_SOON = 14 * 86400
_ROUNDS = 10
_RENEW = "issue a new certificate and replace the files; services read them again, without a restart"


@dataclass(frozen=True)
class AcceptedCertificate:
    """What a peer sees of a certificate that it has accepted."""

    expires: float
    """Seconds since 1970."""
    uris: tuple[str, ...]
    dns_names: tuple[str, ...]


def check_expiry(setting: str, certificate: Path, key: Path | None) -> Iterator[Finding]:
    """Findings about the time in which a certificate is valid. It and its key can be loaded."""
    try:
        accepted = present(certificate, key, None)
    except ssl.SSLError as error:
        yield wrong(f"{setting}: {certificate}", f"it cannot be used: {why_refused(error)}", _RENEW)
        return
    yield expiry_of(setting, certificate, accepted)


def expiry_of(setting: str, certificate: Path, accepted: AcceptedCertificate) -> Finding:
    """A finding about the days for which an accepted certificate is still valid."""
    left = accepted.expires - time.time()
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(accepted.expires))
    found = f"{setting}: {certificate} is valid until {until}"
    if left < _SOON:
        return warning(found, f"it expires in {max(0, left) / 86400:.0f} days", _RENEW)
    return ok(found)


def present(certificate: Path, key: Path | None, ca: Path | None, server_name: str = "") -> AcceptedCertificate:
    """What a peer sees that trusts `ca`, or without one the certificate itself. Both ends have the certificate.

    `server_name` is the name that clients call; empty: none. Raises ssl.SSLError where a peer refuses it.
    """
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = bool(server_name)
    for context in (server, client):
        context.load_cert_chain(certificate, key, password=no_password)
        if ca is not None:
            context.load_verify_locations(ca)
    if ca is None:
        client.load_verify_locations(certificate)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    else:
        server.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    at_client = client.wrap_bio(to_client, to_server, server_hostname=server_name or None)
    at_server = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        if _proceed(at_client) and _proceed(at_server):
            return _accepted(at_client)
        _proceed(at_server)
    raise ssl.SSLError("the handshake did not end")


def _proceed(end: ssl.SSLObject) -> bool:
    """Whether the handshake is done at this end."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _accepted(client: ssl.SSLObject) -> AcceptedCertificate:
    fields: dict[str, Any] = dict(client.getpeercert() or {})
    names: tuple[tuple[str, str], ...] = fields.get("subjectAltName", ())
    return AcceptedCertificate(
        float(ssl.cert_time_to_seconds(fields["notAfter"])),
        tuple(name for kind, name in names if kind == "URI"),
        tuple(name for kind, name in names if kind == "DNS"),
    )


def why_refused(error: ssl.SSLError) -> str:
    """Why a peer refuses a certificate, in lower case."""
    detail = getattr(error, "verify_message", "") or error.reason or str(error)
    return detail.lower().replace("_", " ")
