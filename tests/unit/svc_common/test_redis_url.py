"""The setting QUIRE_REDIS_URL: what is accepted, and that its password is not printed."""

import pytest
from pydantic import ValidationError

from scheduler_svc.settings import SchedulerSettings
from svc_common.redis_url import RedisTarget, RedisUrl
from svc_common.settings import read_settings
from svc_common.supervisor.settings import SupervisorSettings

Kind = type[SchedulerSettings] | type[SupervisorSettings]


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://:pass@host",
        "rediss://user:pa%2Fss%23@host:6380/1?ssl_cert_reqs=required&socket_timeout=3",
        "unix:///run/redis@1.sock?db=1",
        "redis://h?max_connections=3",
        "redis+sentinel://:pass@a:1,b:2,[::1]:3/main/0?sentinel_password=pass",
        "rediss+sentinel://a/main",
        "redis+cluster://:pass@a:1,b:2",
        "rediss+cluster://a/0",
    ],
)
@pytest.mark.parametrize("kind", [SchedulerSettings, SupervisorSettings])
def test_urls_of_redis_are_accepted_unchanged(kind: Kind, url: str) -> None:
    settings = read_settings(kind, ["--redis-url", url])
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == url


@pytest.mark.parametrize(
    "url",
    [
        "http://:s3cr3t@h:1",
        "s3cr3t",
        "redis://:s3cr3t/@h:1/0",  # the password's "/" would end the host
        "redis://:12/s3cr3t@h:1/0",
        "redis://:12?s3cr3t@h:1/0",
        "redis://:s3cr3t#@h:1/0",
        "redis://:12#s3cr3t@h:1/0",
        "redis://:s3cr3t@h:port/0",
        "redis://:s3cr3t@h:99999/0",
        "redis://:s3cr3t@h/0?tiemout=1",
        "redis://:s3cr3t@h/0?db=s3cr3t",
        "redis://:s3cr3t@h/0?socket_timeout=0",
        "redis://:s3cr3t@h/0?socket_timeout=nan",
        "redis://:s3cr3t@h/0?socket_connect_timeout=-1",
        "redis+sentinel://:s3cr3t@h:1/main?socket_connect_timeout=0.0",
        "redis+cluster://:s3cr3t@h:1?socket_timeout=inf",
        "redis://:s3cr3t@h/0?protocol=9",
        "redis://:s3cr3t@h/0?retry=3",
        "redis+sentinels://:s3cr3t@h/main",
        "redis+sentinel://:s3cr3t@h:1",
        "redis+sentinel://:s3cr3t@h:1/main/one",
        "redis+sentinel://:s3cr3t@h:1,:2/main",
        "redis+sentinel://:s3cr3t@h:port/main",
        "redis+sentinel://:s3cr3t/@h:1/main",
        "redis+sentinel://:s3cr3t@h/main?tiemout=1",
        "redis+cluster://:s3cr3t@h:1/1",
        "redis+cluster://:s3cr3t@h:1/main",
        "redis+cluster://:s3cr3t@h:1,",
        "redis+cluster://h:1?sentinel_password=s3cr3t",
        "unix+cluster:///s3cr3t",
    ],
)
@pytest.mark.parametrize("kind", [SchedulerSettings, SupervisorSettings])
def test_a_bad_url_is_refused_without_its_password(
    kind: Kind, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_REDIS_URL", url)
    with pytest.raises(SystemExit) as exit_info:
        read_settings(kind, [])
    assert exit_info.value.code == 2
    printed = capsys.readouterr().err
    assert "QUIRE_REDIS_URL (--redis-url): not a URL of a Redis" in printed
    assert "s3cr3t" not in printed
    with pytest.raises(ValidationError) as error_info:
        kind.model_validate({"redis_url": url})
    assert "s3cr3t" not in str(error_info.value)


@pytest.mark.parametrize("args", [["--redis-ulr", "redis://:s3cr3t@h"], ["--scheduler-port=redis://:s3cr3t@h"]])
@pytest.mark.parametrize("kind", [SchedulerSettings, SupervisorSettings])
def test_a_password_in_a_wrong_flag_is_not_printed(
    kind: Kind, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        read_settings(kind, args)
    assert exit_info.value.code == 2
    printed = capsys.readouterr().err
    assert args[0].split("=")[0] in printed
    assert "***@h" in printed
    assert "s3cr3t" not in printed


@pytest.mark.parametrize("kind", [SchedulerSettings, SupervisorSettings])
def test_settings_are_shown_without_the_password(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://user:s3cr3t@h:1/0")
    settings = read_settings(kind, [])
    for shown in (repr(settings), str(settings), repr(settings.model_dump()), settings.model_dump_json()):
        assert "redis://***@h:1/0" in shown
        assert "s3cr3t" not in shown
    with pytest.raises(SystemExit):
        read_settings(kind, ["--help"])
    printed = capsys.readouterr()
    assert "s3cr3t" not in printed.out + printed.err


@pytest.mark.parametrize("prefix", ["", "a b", "{a}", "ä", "a*", "a" * 65, "a\n"])
@pytest.mark.parametrize("kind", [SchedulerSettings, SupervisorSettings])
def test_a_prefix_that_cannot_be_is_refused(
    kind: Kind, prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_REDIS_PREFIX", prefix)
    with pytest.raises(SystemExit) as exit_info:
        read_settings(kind, [])
    assert exit_info.value.code == 2
    assert "QUIRE_REDIS_PREFIX (--redis-prefix): string should match pattern" in capsys.readouterr().err


def test_help_has_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(SchedulerSettings, ["--help"])
    assert "redis://127.0.0.1:6379/0" in capsys.readouterr().out


def test_an_empty_url_is_none_for_make_run() -> None:
    assert read_settings(SupervisorSettings, ["--redis-url", ""]).redis_url is None


@pytest.mark.parametrize(
    ("url", "layout", "addresses", "service", "options"),
    [
        ("redis://:a%2Fb@h:1/2", "STANDALONE", (), "", {"host": "h", "port": 1, "db": 2, "password": "a/b"}),
        ("redis+sentinel://a:1,b/main/3", "SENTINEL", (("a", 1), ("b", 26379)), "main", {"db": 3}),
        ("redis+sentinel://u:p@[::1]:1/main", "SENTINEL", (("::1", 1),), "main", {"username": "u", "password": "p"}),
        (
            "redis+cluster://:p@a:1,b:2/0?socket_timeout=3",
            "CLUSTER",
            (("a", 1), ("b", 2)),
            "",
            {"password": "p", "socket_timeout": 3.0},
        ),
        ("redis+cluster://a", "CLUSTER", (("a", 6379),), "", {}),
    ],
)
def test_a_url_names_servers(
    url: str, layout: str, addresses: tuple[tuple[str, int], ...], service: str, options: dict[str, object]
) -> None:
    target = RedisTarget.parse(url)
    assert (target.layout.name, target.addresses, target.service) == (layout, addresses, service)
    given = {name: value for name, value in target.options.items() if name != "db" or layout != "CLUSTER"}
    assert given == options
    assert not target.has_tls
    assert RedisTarget.parse(url.replace("redis", "rediss", 1)).has_tls


def test_sentinels_have_credentials_of_their_own() -> None:
    query = "sentinel_username=me&sentinel_password=pa%26ss&socket_timeout=2&ssl_check_hostname=false"
    target = RedisTarget.parse(f"rediss+sentinel://:p@a:1/main?{query}")
    assert target.sentinel_options == {"username": "me", "password": "pa&ss", "ssl_check_hostname": False}
    assert (target.options["password"], target.options["socket_timeout"]) == ("p", 2.0)
    assert "pa%26ss" not in str(RedisUrl(f"rediss+sentinel://:p@a:1/main?{query}"))
