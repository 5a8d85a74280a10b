"""The credential of the role `admin`, for the admin service of a deployment."""

import hashlib
import hmac
import os
import ssl
from pathlib import Path

import grpc

from quire_client.connection import Metadata, channel_options, is_loopback, read_ca_file, read_file, read_pem
from quire_client.errors import QuireError, local_error

DEFAULT_SECRET_FILE = Path("run/deployment.secret")
"""Where `make run` writes the deployment's secret."""

_PAIR = "admin→scheduler"
_SERVER_NAME = "scheduler.quire.internal"
_STATUS = grpc.StatusCode.UNAUTHENTICATED  # of what keeps calls from having their credential
_TLS_FILES = _CA, _KEY, _CERTIFICATE = ("QUIRE_MTLS_CA_FILE", "QUIRE_MTLS_KEY_FILE", "QUIRE_MTLS_CERT_FILE")


def admin_channel(address: str) -> grpc.Channel:
    """A channel to a scheduler's admin service: with mutual TLS if any of its three settings is set.

    Raises QuireError where one of them or its file is missing, or a file cannot be used.
    """
    options = channel_options(address)
    paths = {name: Path(path) for name in _TLS_FILES if (path := os.environ.get(name))}
    if not paths:
        return grpc.insecure_channel(address, options)
    for name in _TLS_FILES:
        if name not in paths:
            raise _refused(f"{name} is not set, and mutual TLS needs it")
    texts = [(read_ca_file if name == _CA else read_pem)(name, path, _STATUS) for name, path in paths.items()]
    _check_certificate(paths[_CERTIFICATE], paths[_KEY])
    # The name stands for the scheduler's role, at any address.
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(*texts), (*options, ("grpc.ssl_target_name_override", _SERVER_NAME))
    )


def _check_certificate(certificate: Path, key: Path) -> None:
    """Raises QuireError where gRPC could not use the certificate with its key: it reports no connection then."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise _refused(f"{_CERTIFICATE}: {certificate} cannot be used with the key of {_KEY}, {key}: {why}") from error


def _no_password() -> str:
    """The password of a key. Raises ValueError, where OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is encrypted")


def _refused(why: str) -> QuireError:
    return local_error(_STATUS, why)


def admin_metadata(address: str, secret_file: Path | None) -> Metadata:
    """The metadata of calls to a scheduler's admin service at `host:port`.

    The secret is in `secret_file`, or QUIRE_DEPLOYMENT_SECRET_FILE, or DEFAULT_SECRET_FILE if it exists; without any of
    them, and beyond loopback, where a token would be sent in clear, the calls carry no credential. Raises QuireError
    where the file cannot be read.
    """
    named = secret_file or os.environ.get("QUIRE_DEPLOYMENT_SECRET_FILE") or None
    if not is_loopback(address) or (named is None and not DEFAULT_SECRET_FILE.exists()):
        return ()
    path = Path(named or DEFAULT_SECRET_FILE)
    secret = read_file("the deployment's secret", path, _STATUS).strip()
    # As svc_common/identity.py does, which this package cannot import: it is installed without the services.
    token = hmac.new(secret, _PAIR.encode(), hashlib.sha256).hexdigest()
    return (("authorization", f"Quire admin {token}"),)
