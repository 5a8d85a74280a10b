"""Certificates made by openssl, as docs/operations.md describes it."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from svc_common.mutual_tls import ROLE_URI, server_name
from svc_common.service_roles import ServiceRole

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


@dataclass(frozen=True)
class Certificate:
    """PEM files of a certificate, its key and its CA."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def variables(self) -> dict[str, str]:
        """The settings of a service."""
        return {
            "QUIRE_MTLS_CERT_FILE": str(self.certificate),
            "QUIRE_MTLS_KEY_FILE": str(self.key),
            "QUIRE_MTLS_CA_FILE": str(self.ca),
        }


class Authority:
    """A CA in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.certificate = directory / "ca.crt"
        self._key = directory / "ca.key"
        _openssl(
            *("req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=test"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def issue(self, name: str, alternative_names: Sequence[str], days: int = 2) -> Certificate:
        """A certificate with these subject alternative names ("DNS:host", "URI:…"). With 0 days, it has expired."""
        made = Certificate(self._directory / f"{name}.crt", self._directory / f"{name}.key", self.certificate)
        request = self._directory / f"{name}.csr"
        extensions = self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternative_names)}\n")
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request))
        _openssl(
            *(
                "x509",
                "-req",
                "-days",
                str(days),
                "-in",
                str(request),
                "-CA",
                str(self.certificate),
                "-CAkey",
                str(self._key),
            ),
            *("-CAcreateserial", "-extfile", str(extensions), "-out", str(made.certificate)),
        )
        return made

    def issue_for(self, role: ServiceRole, days: int = 2) -> Certificate:
        """The certificate of a role."""
        return self.issue(role, [f"URI:{ROLE_URI}{role}", f"DNS:{server_name(role)}"], days)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
