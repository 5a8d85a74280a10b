"""Files for TLS to a Redis: the CA that signed its certificate, and a certificate of our own."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svc_common.redis_url import RedisTarget
from svc_common.tls_files import no_password


@dataclass(frozen=True, slots=True)
class RedisTlsFiles:
    """PEM files; None: the system's CAs, no certificate, a key in the file of the certificate.

    Each new connection reads them, so that they can be replaced.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Arguments of redis-py's connections with TLS."""
        named = {"ssl_ca_certs": self.ca, "ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        return {name: str(path) for name, path in named.items() if path is not None}

    def check(self, target: RedisTarget) -> None:
        """Raises ValueError, which names the setting and the file, where they cannot be used for a target."""
        given = {
            "QUIRE_REDIS_CA_FILE": self.ca,
            "QUIRE_REDIS_CERT_FILE": self.certificate,
            "QUIRE_REDIS_KEY_FILE": self.key,
        }
        for name, path in given.items():
            if path is not None:
                if not target.has_tls:
                    raise ValueError(f"{name} needs a QUIRE_REDIS_URL with TLS, whose scheme begins with rediss")
                _check_readable(name, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise ValueError(f"QUIRE_REDIS_CA_FILE: {self.ca} has no certificate: {error.reason}") from None
        if self.key is not None and self.certificate is None:
            raise ValueError("QUIRE_REDIS_KEY_FILE needs QUIRE_REDIS_CERT_FILE")
        if self.certificate is not None:
            key = "" if self.key is None else f" with the key of {self.key}"
            try:
                context.load_cert_chain(self.certificate, self.key, password=no_password)
            except (ssl.SSLError, ValueError) as error:
                why = getattr(error, "reason", None) or error
                raise ValueError(f"QUIRE_REDIS_CERT_FILE: {self.certificate}{key} cannot be used: {why}") from None


NO_FILES = RedisTlsFiles()


def _check_readable(name: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None
