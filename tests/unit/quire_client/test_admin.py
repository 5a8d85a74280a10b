"""The admin client rejects values that do not fit into a message, before any call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
