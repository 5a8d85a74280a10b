"""Roles in certificates, over real TLS: checked at both ends, and read again when files change."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates import Authority, Certificate
from inner_calls import NO_ANSWER, TIMEOUT, status
from svc_common.channels import internal_channel, is_credential_error
from svc_common.identity import InvalidCredentials
from svc_common.inner_ports import create_inner_server, identity_of
from svc_common.mutual_tls import MutualTlsIdentity
from svc_common.server import HealthReporter, bind, enable_reflection
from svc_common.service_roles import ServiceRole
from svc_common.settings import InnerSettings
from svc_common.tls_files import TlsFiles

REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-ca"))


def identity(certificate: Certificate) -> MutualTlsIdentity:
    paths = ((name, Path(path)) for name, path in certificate.variables.items())
    return MutualTlsIdentity(TlsFiles(*paths))


@asynccontextmanager
async def listening(certificate: Certificate) -> AsyncIterator[str]:
    """The address of a scheduler's inner port, beyond loopback."""
    of_server = identity(certificate)
    server = create_inner_server(of_server)
    health = HealthReporter(server, [])
    enable_reflection(server, [])
    port = bind(server, "0.0.0.0", 0, of_server.server_credentials())
    await server.start()
    await health.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def called(address: str, caller: Certificate) -> tuple[grpc.StatusCode, str]:
    async with identity(caller).outbound(ServiceRole.SCHEDULER).channel(address) as channel:
        return await status(channel, REFLECTION)


async def test_the_role_of_the_certificate_decides(authority: Authority) -> None:
    async with listening(authority.issue_for(ServiceRole.SCHEDULER)) as address:
        for role in ServiceRole:
            code, details = await called(address, authority.issue_for(role))
            if role is ServiceRole.ADMIN:
                assert code is grpc.StatusCode.OK
            else:
                assert (code, f"the role {role} may not call" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)


@pytest.mark.parametrize(
    "names",
    [
        ["DNS:admin.quire.internal"],
        ["URI:quire://role/root"],
        ["URI:quire://role/admin/x"],
        ["URI:quire://role/admin", "URI:quire://role/gateway"],
        ["DNS:quire.role.admin", "URI:https://role/admin"],
        ["email:quire@role.admin"],
    ],
    ids=" ".join,
)
async def test_a_certificate_without_exactly_one_role_proves_nothing(authority: Authority, names: list[str]) -> None:
    async with listening(authority.issue_for(ServiceRole.SCHEDULER)) as address:
        code, _ = await called(address, authority.issue("strange", names))
        assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_certificate_of_the_ca_nothing_answers(
    authority: Authority, other_authority: Authority
) -> None:
    scheduler = authority.issue_for(ServiceRole.SCHEDULER)
    stranger = other_authority.issue_for(ServiceRole.ADMIN)
    ca = authority.certificate.read_bytes()
    with_own_key = grpc.ssl_channel_credentials(ca, stranger.key.read_bytes(), stranger.certificate.read_bytes())
    async with listening(scheduler) as address:
        for credentials in (None, grpc.ssl_channel_credentials(ca), with_own_key):
            async with internal_channel(address, credentials, "scheduler.quire.internal") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
                assert raised.value.code() in NO_ANSWER


@pytest.mark.parametrize("role", [ServiceRole.GATEWAY, ServiceRole.WORKER, ServiceRole.ADMIN])
async def test_a_client_rejects_a_server_of_another_role(authority: Authority, role: ServiceRole) -> None:
    """Otherwise a worker could take a scheduler's place, and read all prompts."""
    async with listening(authority.issue_for(role)) as address:
        gateway = identity(authority.issue_for(ServiceRole.GATEWAY))
        async with gateway.outbound(ServiceRole.SCHEDULER).channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert is_credential_error(raised.value, has_credential=True), raised.value.details()


async def test_a_client_rejects_a_server_of_another_ca(authority: Authority, other_authority: Authority) -> None:
    async with listening(other_authority.issue_for(ServiceRole.SCHEDULER)) as address:
        gateway = identity(authority.issue_for(ServiceRole.GATEWAY))
        async with gateway.outbound(ServiceRole.SCHEDULER).channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert is_credential_error(raised.value, has_credential=True), raised.value.details()


@pytest.mark.parametrize("why", ["another CA", "expired", "none"])
async def test_a_rejected_certificate_of_the_caller_is_a_credential_error(
    why: str, authority: Authority, other_authority: Authority
) -> None:
    """gRPC's text is only that the connection was closed, which says nothing of a call without a credential."""
    issuer, days = (other_authority, 2) if why == "another CA" else (authority, 0)
    caller = issuer.issue_for(ServiceRole.ADMIN, days)
    own = () if why == "none" else (caller.key.read_bytes(), caller.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), *own)
    async with (
        listening(authority.issue_for(ServiceRole.SCHEDULER)) as address,
        internal_channel(address, credentials, "scheduler.quire.internal") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
    assert is_credential_error(raised.value, has_credential=True), raised.value.details()
    assert not is_credential_error(raised.value, has_credential=False)


async def test_a_server_that_does_not_listen_is_no_credential_error(authority: Authority) -> None:
    async with listening(authority.issue_for(ServiceRole.SCHEDULER)) as address:
        pass
    admin = identity(authority.issue_for(ServiceRole.ADMIN))
    async with admin.outbound(ServiceRole.SCHEDULER).channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
    assert not is_credential_error(raised.value, has_credential=True), raised.value.details()


def replace_by(changed: Certificate, new: Certificate) -> None:
    """Replaces each file as an operator or Kubernetes does: by another one under its name."""
    for old, source in ((changed.certificate, new.certificate), (changed.key, new.key), (changed.ca, new.ca)):
        draft = old.with_suffix(".draft")
        shutil.copy(source, draft)
        draft.replace(old)


async def test_changed_files_are_used_for_new_connections(
    authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    mine = Authority(tmp_path / "mine").issue_for(ServiceRole.SCHEDULER)
    callers = Authority(tmp_path / "callers").issue_for(ServiceRole.ADMIN)
    replace_by(mine, authority.issue_for(ServiceRole.SCHEDULER))
    replace_by(callers, authority.issue_for(ServiceRole.ADMIN))
    caller = identity(callers).outbound(ServiceRole.SCHEDULER)

    async def code() -> grpc.StatusCode:
        async with caller.channel(address) as channel:
            return (await status(channel, REFLECTION))[0]

    async with listening(mine) as address:
        assert await code() is grpc.StatusCode.OK
        async with caller.channel(address) as connected:
            assert (await status(connected, REFLECTION))[0] is grpc.StatusCode.OK
            replace_by(mine, other_authority.issue_for(ServiceRole.SCHEDULER))
            assert await code() in NO_ANSWER
            replace_by(callers, other_authority.issue_for(ServiceRole.ADMIN))
            assert await code() is grpc.StatusCode.OK
            # Files that cannot be used are not: the earlier ones stay.
            mine.certificate.write_text("nothing")
            callers.key.unlink()
            assert await code() is grpc.StatusCode.OK
            # A connection lasts.
            assert (await status(connected, REFLECTION))[0] is grpc.StatusCode.OK


def test_files_that_cannot_be_used_are_read_and_logged_once(
    authority: Authority, other_authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Authority(tmp_path / "mine").issue_for(ServiceRole.SCHEDULER)
    files = TlsFiles(("CERT", mine.certificate), ("KEY", mine.key))
    first = files.current()

    def num_logged() -> int:
        assert [files.current() for _ in range(3)] == [first] * 3
        return sum(record.levelname == "WARNING" for record in caplog.records)

    assert num_logged() == 0
    kept = mine.certificate.rename(tmp_path / "kept")
    assert num_logged() == 1, "missing"
    mine.certificate.write_text("nothing")
    assert num_logged() == 2
    mine.certificate.write_text("nothing else")
    assert num_logged() == 3
    kept.rename(mine.certificate)
    assert num_logged() == 3
    mine.certificate.rename(kept)
    assert num_logged() == 4, "missing again"
    replace_by(mine, other_authority.issue_for(ServiceRole.SCHEDULER))
    assert files.current() is not first


@pytest.mark.parametrize("gone", ["certificate", "key", "ca"])
def test_a_file_that_is_gone_while_the_files_are_read_leaves_the_earlier_ones(
    gone: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Authority(tmp_path / "mine").issue_for(ServiceRole.SCHEDULER)
    files = TlsFiles(("CERT", mine.certificate), ("KEY", mine.key), ("CA", mine.ca))
    first = files.current()
    replace_by(mine, authority.issue_for(ServiceRole.SCHEDULER))
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        found = read_bytes(path)
        if path == mine.ca:  # the last one
            getattr(mine, gone).rename(tmp_path / "away")
        return found

    with monkeypatch.context() as patches:
        patches.setattr(Path, "read_bytes", read)
        assert files.current() is first
    (tmp_path / "away").rename(getattr(mine, gone))
    assert files.current() is not first


async def test_files_with_a_byte_order_mark_are_used(authority: Authority, tmp_path: Path) -> None:
    mine = Authority(tmp_path / "mine").issue_for(ServiceRole.ADMIN)
    replace_by(mine, authority.issue_for(ServiceRole.ADMIN))
    for path in (mine.certificate, mine.key, mine.ca):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    async with (
        listening(authority.issue_for(ServiceRole.SCHEDULER)) as address,
        identity(mine).outbound(ServiceRole.SCHEDULER).channel(address) as channel,
    ):
        assert (await status(channel, REFLECTION))[0] is grpc.StatusCode.OK


def test_files_that_cannot_be_used_are_named(authority: Authority, other_authority: Authority, tmp_path: Path) -> None:
    right = authority.issue_for(ServiceRole.WORKER)
    other = other_authority.issue_for(ServiceRole.WORKER)
    (tmp_path / "empty").touch()

    def refused(**changed: object) -> str:
        values = {
            "mtls_cert_file": right.certificate,
            "mtls_key_file": right.key,
            "mtls_ca_file": right.ca,
            **changed,
        }
        with pytest.raises(InvalidCredentials) as raised:
            identity_of(ServiceRole.WORKER, InnerSettings.model_validate(values), ["0.0.0.0"])
        return str(raised.value)

    assert refused(mtls_key_file=None).startswith("QUIRE_MTLS_KEY_FILE: not set")
    assert refused(mtls_ca_file=tmp_path / "no").startswith(f"QUIRE_MTLS_CA_FILE: {tmp_path}/no: no such file")
    assert refused(mtls_ca_file=tmp_path / "empty").startswith("QUIRE_MTLS_CA_FILE: ")
    assert refused(mtls_key_file=other.key).startswith("QUIRE_MTLS_CERT_FILE: ")
    assert "QUIRE_MTLS_KEY_FILE" in refused(mtls_key_file=tmp_path / "empty")
    assert refused(insecure=True).startswith("QUIRE_INSECURE and QUIRE_MTLS_CERT_FILE, ")
