"""The inner ports of a service: who may call them, and on which addresses they may listen."""

import ipaddress
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from svc_common.addresses import HostPort
from svc_common.errors import QuireError, Reason
from svc_common.identity import Identity, InsecureIdentity, InvalidCredentials, TokenIdentity, read_secret
from svc_common.interceptors import Context
from svc_common.mutual_tls import MutualTlsIdentity
from svc_common.request_gate import RequestGate, StreamGate
from svc_common.server import INTERNAL_MESSAGE_BYTES, INTERNAL_OPTIONS, create_server
from svc_common.service_roles import HEALTH_SERVICE, MAY_CALL, ServiceRole, service_of
from svc_common.settings import InnerSettings
from svc_common.tls_files import InvalidTlsFiles, TlsFiles

logger = logging.getLogger("quire.boundary")

_READ_SECONDS = 10.0
"""Time for the message of a call with one message."""
_LOG_SECONDS = 10.0
"""Rejected calls are logged at most once in this time, with their number."""


def identity_of(role: ServiceRole, settings: InnerSettings, listens_on: Sequence[str] = ()) -> Identity:
    """The identity of a service that listens on these hosts with inner ports. Raises InvalidCredentials."""
    files = {name: path for name, path in settings.mtls_files.items() if path is not None}
    if files:
        return _mutual_tls(settings, files)
    if settings.insecure:
        return InsecureIdentity()
    for host in listens_on:
        if not is_loopback(host):
            raise InvalidCredentials(
                f"will not listen on {host}, beyond loopback, without mutual TLS (QUIRE_MTLS_CERT_FILE); set "
                "QUIRE_INSECURE=1 if something else, such as a service mesh, lets only Quire's services connect"
            )
    if settings.deployment_secret_file is None:
        raise InvalidCredentials(
            "QUIRE_DEPLOYMENT_SECRET_FILE is not set: without the deployment's secret, services cannot check who calls "
            "them; `make run` makes one, and QUIRE_INSECURE=1 starts a service without checks"
        )
    try:
        return TokenIdentity(role, read_secret(settings.deployment_secret_file))
    except InvalidCredentials as error:
        raise InvalidCredentials(f"QUIRE_DEPLOYMENT_SECRET_FILE: {error}") from error


def _mutual_tls(settings: InnerSettings, files: dict[str, Path]) -> MutualTlsIdentity:
    if settings.insecure:
        raise InvalidCredentials(f"QUIRE_INSECURE and {', '.join(files)} are both set; unset one of them")
    if missing := settings.mtls_files.keys() - files:
        raise InvalidCredentials(f"{', '.join(sorted(missing))}: not set, and mutual TLS needs all three files")
    try:
        return MutualTlsIdentity(TlsFiles(*files.items()))
    except InvalidTlsFiles as error:
        raise InvalidCredentials(str(error)) from error


def check_dialled(identity: Identity, addresses: Sequence[HostPort], setting: str) -> None:
    """Raises InvalidCredentials where a token would be sent to one of these addresses beyond loopback."""
    for address in addresses:
        if isinstance(identity, TokenIdentity) and not is_loopback(address.host):
            raise InvalidCredentials(
                f"{setting} names {address}, beyond loopback, where tokens would be sent in clear: use mutual TLS "
                "(QUIRE_MTLS_CERT_FILE), or set QUIRE_INSECURE=1 if something else, such as a service mesh, protects "
                "these connections"
            )


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def create_inner_server(identity: Identity) -> grpc.aio.Server:
    """A server for other services of the deployment, not bound yet."""
    check = CallerCheck(identity)
    return create_server(
        max_message_bytes=INTERNAL_MESSAGE_BYTES,
        interceptors=(RequestGate(_READ_SECONDS, check), StreamGate(check)),
        options=INTERNAL_OPTIONS,
    )


class CallerCheck:
    """Rejects calls whose sender may not make them."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._num_rejected = 0
        self._logged_at = -_LOG_SECONDS

    def __call__(self, method: str, context: Context) -> bool:
        """True. Raises QuireError for a call without a valid credential, or of a role that may not make it."""
        service = service_of(method)
        if not self._identity.is_checked or service == HEALTH_SERVICE:
            return True
        caller = self._identity.authenticate(context)
        if caller in MAY_CALL.get(service, ()):
            return True
        if caller is None:
            error = QuireError(Reason.UNAUTHENTICATED, "the call has no valid credential of this deployment")
        else:
            error = QuireError(Reason.PERMISSION_DENIED, f"the role {caller} may not call {service}")
        self._log(method, context, error)
        raise error

    def _log(self, method: str, context: Context, error: QuireError) -> None:
        self._num_rejected += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            extra = {"method": method, "peer": context.peer(), "why": error.message, "calls": self._num_rejected}
            logger.warning("rejected a call to an inner port", extra=extra)
            self._logged_at, self._num_rejected = now, 0
