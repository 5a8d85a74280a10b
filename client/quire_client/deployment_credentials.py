"""The credential of the role `admin`, for the admin service of a deployment."""

import hashlib
import hmac
import os
from pathlib import Path

import grpc

from quire_client.connection import Metadata, is_loopback
from quire_client.errors import QuireError

DEFAULT_SECRET_FILE = Path("run/deployment.secret")
"""Where `make run` writes the deployment's secret."""

_PAIR = "admin→scheduler"


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
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        why = f"{path}, the deployment's secret: {(error.strerror or str(error)).lower()}"
        raise QuireError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", why) from error
    token = hmac.new(secret, _PAIR.encode(), hashlib.sha256).hexdigest()
    return (("authorization", f"Quire admin {token}"),)
