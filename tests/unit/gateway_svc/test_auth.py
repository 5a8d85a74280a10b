"""API keys."""

import hashlib
from pathlib import Path

import pytest

from gateway_svc.auth import DEFAULT_TENANT, Authenticator, InvalidKeyFile, Tenant
from svc_common.errors import QuireError, Reason


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    digest = hashlib.sha256(b"second-key").hexdigest().upper()
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
        [[keys]]
        key = "first-key"
        tenant = "alice"
        weight = 2
        [[keys]]
        sha256 = "{digest}"
        tenant = "bob"
        """
    )
    return Authenticator.from_file(path)


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [
        ("Bearer first-key", Tenant("alice", 2.0)),
        ("bearer first-key", Tenant("alice", 2.0)),
        ("Bearer second-key", Tenant("bob", 1.0)),
    ],
)
def test_a_key_leads_to_its_tenant(authenticator: Authenticator, authorization: str, tenant: Tenant) -> None:
    assert authenticator.tenant(authorization) == tenant


@pytest.mark.parametrize("authorization", [None, "", "first-key", "Bearer", "Bearer ", "Basic first-key", "Bearer x"])
def test_anything_else_is_refused(authenticator: Authenticator, authorization: str | None) -> None:
    with pytest.raises(QuireError) as refusal:
        authenticator.tenant(authorization)
    assert refusal.value.reason is Reason.UNAUTHENTICATED


def test_without_a_file_everyone_is_the_default_tenant() -> None:
    assert Authenticator.from_file(None).tenant(None) == DEFAULT_TENANT == Tenant("default", 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no [[keys]] table"),
        ("keys = 1", "no [[keys]] table"),
        ("keys = [1]", "is not a table"),
        ('[[keys]]\ntenant = "a"', "either key or sha256"),
        ('[[keys]]\nkey = "secret"\nsha256 = "x"\ntenant = "a"', "either key or sha256"),
        ('[[keys]]\nkey = " secret"\ntenant = "a"', "keys[0].key"),
        ('[[keys]]\nsha256 = "secret"\ntenant = "a"', "keys[0].sha256"),
        ('[[keys]]\nkey = "secret"', "keys[0].tenant"),
        ('[[keys]]\nkey = "secret"\ntenant = "a"\nweight = 0', "keys[0].weight"),
        ('[[keys]]\nkey = "secret"\ntenant = "a"\nweight = nan', "keys[0].weight"),
        ('[[keys]]\nkey = "secret"\ntenant = "a"\nquota = 1', "quota"),
        ('[[keys]]\nkey = "secret"\ntenant = "a"\n[[keys]]\nkey = "secret"\ntenant = "b"', "twice"),
        ("[[keys", "keys.toml"),
    ],
)
def test_the_error_of_a_bad_file_does_not_contain_its_keys(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidKeyFile) as error:
        Authenticator.from_file(path)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(InvalidKeyFile, match="no-such-file"):
        Authenticator.from_file(Path("no-such-file"))
