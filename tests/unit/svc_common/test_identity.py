"""Tokens of pairs of roles, and the file with the secret that they are derived from."""

from pathlib import Path

import pytest

from quire_client.deployment_credentials import admin_metadata
from svc_common.identity import (
    InvalidCredentials,
    TokenIdentity,
    make_secret,
    pair_token,
    read_secret,
    token_metadata,
)
from svc_common.service_roles import ServiceRole

SECRET = bytes(range(32))


class CallMetadata:
    """The metadata of a call, as a context has it."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self._pairs = pairs

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._pairs


def test_every_pair_has_a_token_of_its_own() -> None:
    tokens = {pair_token(SECRET, caller, callee) for caller in ServiceRole for callee in ServiceRole}
    assert len(tokens) == len(ServiceRole) ** 2
    assert pair_token(SECRET[::-1], ServiceRole.ADMIN, ServiceRole.SCHEDULER) not in tokens


def test_a_callee_knows_the_caller_by_its_token() -> None:
    scheduler = TokenIdentity(ServiceRole.SCHEDULER, SECRET)
    for caller in ServiceRole:
        outbound = TokenIdentity(caller, SECRET).outbound(ServiceRole.SCHEDULER)
        assert scheduler.authenticate(CallMetadata(*outbound.metadata)) is caller  # type: ignore[arg-type]
        assert SECRET.hex() not in str(outbound.metadata)
        assert outbound.metadata[0][1] not in repr(outbound)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Quire",
        "Quire gateway",
        "Quire gateway ",
        f"Quire gateway {'0' * 64}",
        f"Quire root {'0' * 64}",
        f"Bearer {pair_token(SECRET, ServiceRole.GATEWAY, ServiceRole.SCHEDULER)}",
        f"Quire worker {pair_token(SECRET, ServiceRole.GATEWAY, ServiceRole.SCHEDULER)}",
        f"Quire gateway {pair_token(SECRET, ServiceRole.GATEWAY, ServiceRole.WORKER)}",
        f"Quire gateway {pair_token(SECRET, ServiceRole.GATEWAY, ServiceRole.SCHEDULER)[:-1]}",
        "Quire gateway \u0661",
    ],
    ids=lambda value: f"{len(value)} characters",
)
def test_anything_else_proves_nothing(value: str) -> None:
    scheduler = TokenIdentity(ServiceRole.SCHEDULER, SECRET)
    assert scheduler.authenticate(CallMetadata(("authorization", value))) is None  # type: ignore[arg-type]


def test_the_clients_package_makes_the_same_token(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET.hex().encode() + b"\n")
    token = pair_token(read_secret(_private(tmp_path / "secret")), ServiceRole.ADMIN, ServiceRole.SCHEDULER)
    expected = token_metadata(ServiceRole.ADMIN, token)
    assert admin_metadata("127.0.0.1:50062", tmp_path / "secret") == expected
    assert admin_metadata("scheduler.example.com:50062", tmp_path / "secret") == ()


def test_a_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    first = read_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    make_secret(path)
    assert read_secret(path) == first
    assert len(first) == 64
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_that_protects_nothing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(InvalidCredentials, match="secret: no such file"):
        read_secret(path)
    path.write_bytes(b"x" * 31 + b"\n")
    with pytest.raises(InvalidCredentials, match="has 31 bytes; a secret has at least 32"):
        read_secret(_private(path))
    path.write_bytes(SECRET.hex().encode())
    path.chmod(0o644)
    with pytest.raises(InvalidCredentials, match="all users of this machine"):
        read_secret(path)


def _private(path: Path) -> Path:
    path.chmod(0o600)
    return path
