"""Settings of the gateway."""

import re
from pathlib import Path

import pytest

from gateway_svc.settings import BadSetting, GatewaySettings
from svc_common.addresses import HostPort
from svc_common.settings import read_settings


def test_schedulers_are_read_one_by_one() -> None:
    settings = read_settings(GatewaySettings, ["--schedulers-at", "a:1, b.c:2,[::1]:3 "])
    assert settings.scheduler_addresses == [HostPort("a", 1), HostPort("b.c", 2), HostPort("::1", 3)]


def test_variables_are_the_same_as_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HTTP_PORT", "1")
    monkeypatch.setenv("QUIRE_DRAIN_GRACE", "2.5")
    settings = read_settings(GatewaySettings, ["--grpc-port", "3"])
    assert (settings.http_port, settings.grpc_port, settings.drain_grace) == (1, 3, 2.5)


@pytest.mark.parametrize("value", ["", "a", "a:b", "a:1,", "a:1 b:2", "a:0", "a:65536", "a..b:1", "::1:1"])
def test_a_bad_list_of_schedulers_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, ["--schedulers-at", value])
    assert "QUIRE_SCHEDULERS_AT" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["a b", "a,", "a/b", "a:1", "*a"])
def test_a_bad_list_of_hosts_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, ["--allowed-hosts", value])
    assert "QUIRE_ALLOWED_HOSTS" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["llm", "/", "/llm/", "/a//b", "/a b"])
def test_a_bad_root_path_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, ["--root-path", value])
    assert "QUIRE_ROOT_PATH" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["example.com", "https://a/", "https://a b", "https://a,"])
def test_a_bad_list_of_origins_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, ["--cors-origins", value])
    assert "QUIRE_CORS_ORIGINS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "why"), [("", ".: is a directory"), ("/none", "/none: no such file or directory"), ("{path}", "{path}: ")]
)
def test_a_file_of_keys_that_cannot_be_used_is_named_with_its_variable(value: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys")
    settings = read_settings(GatewaySettings, ["--api-keys", value.format(path=path)])
    with pytest.raises(BadSetting, match=f"^QUIRE_API_KEYS: {re.escape(why.format(path=path))}"):
        settings.key_file()
