"""The admin client rejects values that do not fit into a message, and files that it cannot use, before any call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from quire_client.admin import AdminClient
from quire_client.errors import QuireError


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.explain("mine", prompt=5_000_000_000), "name.prompt"),
        (lambda client: client.explain("mine", prompt=-1), "name.prompt"),
        (lambda client: client.explain("\udcff"), "name.request_id"),
        (lambda client: client.explain("mine", tenant="\udcff"), "name.tenant"),
        (lambda client: client.explain_key("\udcff"), "key"),
        (lambda client: client.requests(tenant="\udcff"), "tenant"),
        (lambda client: client.requests(limit=-1), "limit"),
    ],
)
def test_a_value_that_no_message_can_hold_is_refused_by_its_field(
    call: Callable[[AdminClient], Any], field: str
) -> None:
    with AdminClient("127.0.0.1:1") as client, pytest.raises(QuireError) as refused:
        call(client)
    assert (refused.value.reason, refused.value.field) == ("INVALID_FIELD", field)


@pytest.mark.parametrize("missing", ["QUIRE_MTLS_CERT_FILE", "QUIRE_MTLS_KEY_FILE", "QUIRE_MTLS_CA_FILE"])
def test_a_missing_setting_of_mutual_tls_is_an_error(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "any.pem"
    path.write_text("PEM")
    for name in ("QUIRE_MTLS_CERT_FILE", "QUIRE_MTLS_KEY_FILE", "QUIRE_MTLS_CA_FILE"):
        monkeypatch.setenv(name, str(path))
    monkeypatch.delenv(missing)
    with pytest.raises(QuireError, match=f"{missing} is not set, and mutual TLS needs it"):
        AdminClient("127.0.0.1:1")


def test_a_file_of_mutual_tls_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "ca")
    own, other = (authority.issue(name, ["URI:quire://role/admin"]) for name in ("own", "other"))
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("no certificate")
    files = {"CERT": own.certificate, "KEY": own.key, "CA": authority.certificate}
    for name, path in files.items():
        monkeypatch.setenv(f"QUIRE_MTLS_{name}_FILE", str(path))
    AdminClient("127.0.0.1:1").close()
    for name, path, why in (
        (
            "CERT",
            no_pem,
            f"QUIRE_MTLS_CERT_FILE: {no_pem} cannot be used with the key of QUIRE_MTLS_KEY_FILE, {own.key}",
        ),
        ("KEY", other.key, f"{own.certificate} cannot be used with the key of QUIRE_MTLS_KEY_FILE, {other.key}"),
        ("CA", no_pem, f"QUIRE_MTLS_CA_FILE: {no_pem} has no certificate in PEM format"),
    ):
        monkeypatch.setenv(f"QUIRE_MTLS_{name}_FILE", str(path))
        with pytest.raises(QuireError, match=re.escape(why)):
            AdminClient("127.0.0.1:1")
        monkeypatch.setenv(f"QUIRE_MTLS_{name}_FILE", str(files[name]))


def test_a_url_is_no_address_of_a_scheduler() -> None:
    with pytest.raises(QuireError, match="is a URL: an address is host:port, of a scheduler's admin port"):
        AdminClient("http://127.0.0.1:1")


def test_a_call_of_a_closed_client_is_an_error_of_quire() -> None:
    client = AdminClient("127.0.0.1:1")
    client.close()
    with pytest.raises(QuireError, match="the client was closed"):
        client.requests()
