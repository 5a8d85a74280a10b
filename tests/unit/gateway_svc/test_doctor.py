"""The gateway's checks of `quire doctor`."""

import resource
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from gateway_svc import doctor
from gateway_svc.settings import GatewaySettings
from svc_common.doctor.findings import CheckContext, Finding, Status
from tiny_model import make_model_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_directory(tmp_path / "tiny")


def found(name: str, **settings: Any) -> Finding:
    """The one finding of a check."""
    (check,) = (each for each in doctor.GROUP.checks if each.name == name)
    (finding,) = check.find(CheckContext(GatewaySettings(**settings)))
    return finding


def test_a_model_that_can_be_used(model: Path) -> None:
    assert found("models", model=str(model)).status is Status.OK


def test_a_tokenizer_that_is_damaged(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    finding = found("models", model=str(model))
    assert (finding.status, str(model) in finding.problem) == (Status.WRONG, True)


def test_a_model_without_a_chat_template(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    finding = found("models", model=str(model))
    assert (finding.status, "QUIRE_CHAT_TEMPLATE" in finding.next_step) == (Status.WARNING, True)


def test_a_model_that_embeds_needs_no_chat_template(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    assert found("models", model=str(model), task="embed").status is Status.OK


@pytest.mark.parametrize(
    ("text", "mode", "status", "words"),
    [
        ('[[keys]]\nkey = "sixteen-characters-long"\ntenant = "a"\n', 0o600, Status.OK, "1 keys"),
        ('[[keys]]\nkey = "sixteen-characters-long"\ntenant = "a"\n', 0o644, Status.WARNING, "chmod o= "),
        ('[[keys]]\nkey = "short"\ntenant = "a"\n', 0o600, Status.WRONG, "keys[0]"),
        (
            '[[keys]]\nkey = "sixteen-characters-long"\ntenant = "a"\nexpires = 2020-01-01T00:00:00Z\n',
            0o600,
            Status.WARNING,
            "1 of them have expired",
        ),
    ],
    ids=["good", "readable", "short", "expired"],
)
def test_a_file_of_keys(tmp_path: Path, text: str, mode: int, status: Status, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    finding = found("keys", api_keys=path)
    assert finding.status is status
    assert words in f"{finding.found} {finding.problem} {finding.next_step}"
    assert "sixteen" not in f"{finding}"


def test_no_keys_beyond_loopback() -> None:
    assert found("keys").status is Status.OK
    assert found("keys", host="0.0.0.0").status is Status.WARNING


def test_a_certificate_without_its_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made, other = authority.issue("host", ["DNS:host"], 40), authority.issue("other", ["DNS:other"], 40)
    assert found("tls", tls_cert_file=made.certificate, tls_key_file=made.key).status is Status.OK
    assert "QUIRE_TLS_KEY_FILE" in found("tls", tls_cert_file=made.certificate).problem
    assert "cannot be used with the key" in found("tls", tls_cert_file=made.certificate, tls_key_file=other.key).problem


def test_a_limit_of_open_files_below_the_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        finding = found("open files", max_http_connections=before[1] + 1)
        assert (finding.status, "LimitNOFILE" in finding.next_step) == (Status.WARNING, True)
        assert found("open files", max_http_connections=1, max_grpc_connections=1).status is Status.OK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
