"""Mutual TLS between the services of a deployment. Roles are in the certificates, and checked at both ends."""

from collections.abc import Sequence
from functools import partial

import grpc

from svc_common.channels import internal_channel
from svc_common.identity import Identity, Outbound
from svc_common.interceptors import Context
from svc_common.service_roles import ServiceRole
from svc_common.tls_files import TlsFiles, grpc_server_credentials

ROLE_URI = "quire://role/"
"""The beginning of the subject alternative name (URI) of a role's certificate: quire://role/scheduler."""


def server_name(role: ServiceRole) -> str:
    """The DNS name in the certificate of a role that serves.

    gRPC's clients check names only. The name stands for the role, since workers are dialled by addresses, which no
    certificate has.
    """
    return f"{role}.quire.internal"


class MutualTlsIdentity(Identity):
    """A certificate that the deployment's CA issued for a role. New connections use changed files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc_server_credentials(self._files, requires_certificate=True)

    def outbound(self, callee: ServiceRole) -> Outbound:
        return Outbound(partial(self._channel, callee))

    def _channel(self, callee: ServiceRole, address: str) -> grpc.aio.Channel:
        files = self._files.current()
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        return internal_channel(address, credentials, server_name(callee))

    def authenticate(self, context: Context) -> ServiceRole | None:
        return role_in([bytes(uri).decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())])


def role_in(uris: Sequence[str]) -> ServiceRole | None:
    """The role that the alternative names (URIs) of a certificate state; None: none, several or an unknown one."""
    names = [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]
    if len(names) != 1 or names[0] not in list(ServiceRole):
        return None
    return ServiceRole(names[0])
