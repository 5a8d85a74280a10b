"""Files of a certificate, its key and CA certificates, which are read again when they change."""

import codecs
import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from svc_common.files import FileVersion, file_version, why_unreadable

logger = logging.getLogger("quire.boundary")

_Version = tuple[FileVersion, ...]


class InvalidTlsFiles(Exception):  # noqa: N818
    """Files that cannot be used. The text is for the operator, and names the setting."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """PEM text. `ca` is empty where no file of CA certificates is set. `context` has the same, for a server."""

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes
    context: ssl.SSLContext


class TlsFiles:
    """A certificate with its chain, its key, and optionally the CA certificates that have issued those of peers.

    `current` may be called from any thread.
    """

    def __init__(
        self, certificate: tuple[str, Path], key: tuple[str, Path], ca: tuple[str, Path] | None = None
    ) -> None:
        """Each is the name of a setting and its path. Raises InvalidTlsFiles."""
        self.paths: Mapping[str, Path] = dict(filter(None, (certificate, key, ca)))
        self._certificate, self._key = certificate, key
        self._ca = ca
        self._lock = threading.Lock()
        self._version = self._stat()
        self._contents = self._read()
        self._unusable: _Version | None = ()  # the version that could not be used; None: a file is missing

    def current(self) -> TlsContents:
        """The contents now, or, where these cannot be used, the last ones that could be."""
        with self._lock:
            version = None
            try:
                version = self._stat()
                if version == self._version:
                    self._unusable = ()
                elif version != self._unusable:
                    contents = self._read()
                    if self._has_version(version):  # else they change at this moment, and the next call reads them
                        self._contents, self._version, self._unusable = contents, version, ()
                        logger.info("certificates were read again", extra={"files": [*map(str, self.paths.values())]})
            except InvalidTlsFiles as error:
                is_changing = version is not None and not self._has_version(version)
                if is_changing or (version is None and self._unusable is None):
                    return self._contents
                self._unusable = version
                logger.warning("changed certificates cannot be used; the earlier ones stay", extra={"why": str(error)})
            return self._contents

    def _has_version(self, version: _Version) -> bool:
        try:
            return version == self._stat()
        except InvalidTlsFiles:
            return False

    def _stat(self) -> _Version:
        found = []
        for name, path in self.paths.items():
            try:
                found.append(file_version(path))
            except OSError as error:
                raise InvalidTlsFiles(f"{name}: {path}: {why_unreadable(error)}") from error
        return tuple(found)

    def _read(self) -> TlsContents:
        texts = {}
        for name, path in self.paths.items():
            try:
                texts[name] = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # with it gRPC finds nothing
            except OSError as error:
                raise InvalidTlsFiles(f"{name}: {path}: {why_unreadable(error)}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        name, path = self._certificate
        try:
            context.load_cert_chain(path, self._key[1], password=no_password)
        except (OSError, ValueError) as error:  # OSError also where a file is gone since it was read
            why = f"cannot be used with the key of {self._key[0]}, {self._key[1]}"
            raise InvalidTlsFiles(f"{name}: {path} {why}: {_reason(error)}") from error
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca[1])
            except OSError as error:
                raise InvalidTlsFiles(f"{self._ca[0]}: {self._ca[1]} has no certificate: {_reason(error)}") from error
        return TlsContents(texts[name], texts[self._key[0]], texts[self._ca[0]] if self._ca else b"", context)


def grpc_server_credentials(files: TlsFiles, *, requires_certificate: bool) -> grpc.ServerCredentials:
    """Credentials of a gRPC server that uses changed files for new connections.

    `requires_certificate`: clients have one that the CA has issued.
    """
    used = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """What a new connection is to use; None: the same as the one before."""
        nonlocal used
        before, used = used, files.current()
        return None if used is before else _configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # the stubs leave out None
        require_client_authentication=requires_certificate,
    )


def http_server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context of an HTTP server that uses changed files for new connections."""

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = files.current().context

    context = files.current().context
    context.sni_callback = choose
    return context


def _configuration(files: TlsContents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.ca or None)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")


def no_password() -> str:
    """The password of a key. Raises ValueError, where OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is encrypted")
