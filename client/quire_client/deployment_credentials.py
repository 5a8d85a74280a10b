"""The credential of the role `admin`, for the admin service of a deployment."""

import hashlib
import hmac
import os
from pathlib import Path

import grpc

from quire_client.connection import Metadata, channel_options, is_loopback
from quire_client.errors import QuireError

DEFAULT_SECRET_FILE = Path("run/deployment.secret")
"""Where `make run` writes the deployment's secret."""

_PAIR = "admin→scheduler"
_SERVER_NAME = "scheduler.quire.internal"
_TLS_FILES = ("QUIRE_MTLS_CA_FILE", "QUIRE_MTLS_KEY_FILE", "QUIRE_MTLS_CERT_FILE")


def admin_channel(address: str) -> grpc.Channel:
    """A channel to a scheduler's admin service: with mutual TLS if any of its three settings is set.

    Raises QuireError where one of them or its file is missing.
    """
    options = channel_options(address)
    paths = {name: os.environ.get(name) for name in _TLS_FILES}
    if not any(paths.values()):
        return grpc.insecure_channel(address, options)
    texts = []
    for name, path in paths.items():
        if not path:
            raise _unusable(f"{name} is not set, and mutual TLS needs it")
        texts.append(_read(name, Path(path)))
    # The name stands for the scheduler's role, at any address.
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(*texts), (*options, ("grpc.ssl_target_name_override", _SERVER_NAME))
    )


def admin_metadata(address: str, secret_file: Path | None) -> Metadata:
    """The metadata of calls to a scheduler's admin service at `host:port`.

    The secret is in `secret_file`, or QUIRE_DEPLOYMENT_SECRET_FILE, or DEFAULT_SECRET_FILE if it exists; without any of
    them, and beyond loopback, where a token would be sent in clear, the calls carry no credential. Raises QuireError
    where the file cannot be read.
    """
    named = secret_file or os.environ.get("QUIRE_DEPLOYMENT_SECRET_FILE") or None
    if not is_loopback(address) or (named is None and not DEFAULT_SECRET_FILE.exists()):
        return ()
    secret = _read("the deployment's secret", Path(named or DEFAULT_SECRET_FILE)).strip()
    token = hmac.new(secret, _PAIR.encode(), hashlib.sha256).hexdigest()
    return (("authorization", f"Quire admin {token}"),)


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(f"{what}: {path}: {(error.strerror or str(error)).lower()}") from error


def _unusable(why: str) -> QuireError:
    return QuireError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", why)
