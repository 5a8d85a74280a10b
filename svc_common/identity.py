"""How a service proves its role to the services that it calls, and how it checks the roles of its own callers."""

import hashlib
import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from svc_common.channels import internal_channel
from svc_common.files import may_others_access, why_unreadable
from svc_common.interceptors import Context
from svc_common.service_roles import ServiceRole

MIN_SECRET_BYTES = 32
SECRET_FILE = "deployment.secret"
"""The file that `make run` makes in QUIRE_RUN_DIR."""

_METADATA_KEY = "authorization"
_SCHEME = "Quire"


class InvalidCredentials(Exception):  # noqa: N818
    """A service cannot prove its role, or not check its callers. The text is for the operator, and names a setting."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """How a process calls the services of one role: its channels, and the metadata of each call."""

    channel: Callable[[str], grpc.aio.Channel] = internal_channel
    """A channel to `host:port`."""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def has_credential(self) -> bool:
        """Whether it proves this process's role, by its connection or in each call."""
        return self != PLAIN


PLAIN = Outbound()
"""Calls that carry no credential."""


class Identity(ABC):
    """The role of this process among the services of its deployment."""

    is_checked = True
    """Whether its inner ports check the roles of callers."""

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What one of its inner ports requires of connections; None: nothing."""
        return None

    @abstractmethod
    def outbound(self, callee: ServiceRole) -> Outbound:
        """How it calls services of a role."""

    @abstractmethod
    def authenticate(self, context: Context) -> ServiceRole | None:
        """The proven role of a call's sender; None: it has proven none."""


class InsecureIdentity(Identity):
    """Proves nothing and checks nothing: something else protects the inner ports."""

    is_checked = False

    def outbound(self, callee: ServiceRole) -> Outbound:
        return PLAIN

    def authenticate(self, context: Context) -> ServiceRole | None:
        return None


class TokenIdentity(Identity):
    """A token for each pair of caller and callee, derived from the deployment's secret.

    For loopback only: tokens are sent in clear.
    """

    def __init__(self, role: ServiceRole, secret: bytes) -> None:
        self._role = role
        self._secret = secret
        self._expected = {caller: pair_token(secret, caller, role).encode() for caller in ServiceRole}

    def outbound(self, callee: ServiceRole) -> Outbound:
        return Outbound(metadata=token_metadata(self._role, pair_token(self._secret, self._role, callee)))

    def authenticate(self, context: Context) -> ServiceRole | None:
        credential = dict(context.invocation_metadata() or ()).get(_METADATA_KEY, "")
        scheme, _, rest = str(credential).partition(" ")
        name, _, token = rest.partition(" ")
        if scheme != _SCHEME or name not in list(ServiceRole):
            return None
        role = ServiceRole(name)
        return role if hmac.compare_digest(token.encode(), self._expected[role]) else None


def pair_token(secret: bytes, caller: ServiceRole, callee: ServiceRole) -> str:
    """The token that a caller sends to a callee: HMAC-SHA256 over "caller→callee", as hex."""
    return hmac.new(secret, f"{caller}→{callee}".encode(), hashlib.sha256).hexdigest()


def token_metadata(caller: ServiceRole, token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a token."""
    return ((_METADATA_KEY, f"{_SCHEME} {caller} {token}"),)


def read_secret(path: Path) -> bytes:
    """The deployment's secret in a file, without white space at its ends. Raises InvalidCredentials."""
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidCredentials(f"{path}: {why_unreadable(error)}") from error
    if may_others_access(mode):
        raise InvalidCredentials(f"{path}: all users of this machine can access it; run `chmod o= {path}`")
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidCredentials(f"{path}: has {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES}")
    return secret


def make_secret(path: Path) -> None:
    """Writes a random secret to a file, which only its owner may read, unless the file exists. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(os.urandom(32).hex() + "\n")
    try:
        os.link(draft, path)  # fails where the file exists, and never leaves a part of one
    except FileExistsError:
        pass
    finally:
        draft.unlink()
