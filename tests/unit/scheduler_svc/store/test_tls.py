"""A store in a Redis that requires TLS and a client's certificate."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import Authority, Certificate
from redis_fleets import LOCALHOST, ServerTls, tls_server
from request_logs import request_log
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.base import StoreUnavailable, WriteBatch
from scheduler_svc.store.redis import RedisStore
from store_writes import EPOCH, put, tokens_of
from svc_common.redis_tls import NO_FILES, RedisTlsFiles
from svc_common.settings import read_settings


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Certificate:
    """The scheduler's certificate."""
    return authority.issue("scheduler", LOCALHOST)


@pytest.fixture(scope="module")
def url(authority: Authority, own: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tls_server(
        tmp_path_factory.mktemp("redis"), ServerTls(authority.certificate, authority.issue("redis", LOCALHOST), own)
    ) as url:
        yield url


async def until_reached(store: RedisStore) -> None:
    """Waits until a connection is there: on a busy machine it may take longer than a call may."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await store.leader() is None
                await store.read("no such key")
                await store.write(WriteBatch(), EPOCH)
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def test_a_store_is_reached_with_the_ca_and_a_certificate(
    url: str, authority: Authority, own: Certificate, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_text(own.certificate.read_text() + own.key.read_text())
    for files in (
        RedisTlsFiles(authority.certificate, own.certificate, own.key),
        RedisTlsFiles(authority.certificate, both),
    ):
        store = RedisStore(url, tls=files)
        await until_reached(store)
        log = await put(store, request_log(), 1, 2, 3)
        assert await tokens_of(store, log) == [[1, 2, 3]]
        await store.close()


async def test_a_new_connection_reads_the_files_again(
    url: str, authority: Authority, own: Certificate, tmp_path: Path
) -> None:
    path = tmp_path / "scheduler.pem"
    stranger = Authority(tmp_path / "other").issue("scheduler", LOCALHOST)
    path.write_text(stranger.certificate.read_text() + stranger.key.read_text())
    store = RedisStore(url, tls=RedisTlsFiles(authority.certificate, path))
    with pytest.raises(StoreUnavailable):
        await store.leader()
    path.write_text(own.certificate.read_text() + own.key.read_text())
    await until_reached(store)
    await store.close()


async def test_a_server_or_client_of_another_ca_is_refused(
    url: str, authority: Authority, own: Certificate, tmp_path: Path
) -> None:
    other = Authority(tmp_path)
    stranger = other.issue("scheduler", LOCALHOST)
    for files in (
        NO_FILES,
        RedisTlsFiles(authority.certificate),
        RedisTlsFiles(other.certificate, own.certificate, own.key),
        RedisTlsFiles(authority.certificate, stranger.certificate, stranger.key),
    ):
        store = RedisStore(url, tls=files)
        with pytest.raises(StoreUnavailable):
            await store.leader()
        await store.close()


@pytest.fixture
def encrypted_key(own: Certificate, tmp_path: Path) -> Path:
    path = tmp_path / "encrypted.key"
    command = ("openssl", "ec", "-in", own.key, "-aes128", "-passout", "pass:secret", "-out", path)
    subprocess.run(command, check=True, capture_output=True)
    return path


async def test_the_password_of_a_key_is_not_asked_for_on_the_terminal(
    url: str, authority: Authority, own: Certificate, encrypted_key: Path
) -> None:
    store = RedisStore(url, tls=RedisTlsFiles(authority.certificate, own.certificate, encrypted_key))
    with pytest.raises(StoreUnavailable, match="the key is encrypted"):
        await store.leader()
    await store.close()


def refused(capsys: pytest.CaptureFixture[str], *flags: str, url: str = "rediss://h:1/0") -> str:
    with pytest.raises(SystemExit) as exit_info:
        read_settings(SchedulerSettings, ["--redis-url", url, *flags])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_files_that_cannot_be_used_are_named(
    authority: Authority, own: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, missing, other = tmp_path / "empty.pem", tmp_path / "missing.pem", authority.issue("other", LOCALHOST)
    empty.touch()
    for flag, name in (("ca", "CA"), ("cert", "CERT"), ("key", "KEY")):
        pair = ("--redis-cert-file", str(own.certificate)) if flag == "key" else ()
        printed = refused(capsys, *pair, f"--redis-{flag}-file", str(missing))
        assert f"QUIRE_REDIS_{name}_FILE: {missing}: No such file or directory" in printed
    assert f"QUIRE_REDIS_CA_FILE: {empty} has no certificate" in refused(capsys, "--redis-ca-file", str(empty))
    flags = ("--redis-cert-file", str(own.certificate), "--redis-key-file", str(other.key))
    expected = (
        f"QUIRE_REDIS_CERT_FILE: {own.certificate} with the key of {other.key} cannot be used: KEY_VALUES_MISMATCH"
    )
    assert expected in refused(capsys, *flags)
    printed = refused(capsys, "--redis-cert-file", str(own.certificate))
    assert f"QUIRE_REDIS_CERT_FILE: {own.certificate} cannot be used" in printed
    assert "QUIRE_REDIS_KEY_FILE needs QUIRE_REDIS_CERT_FILE" in refused(capsys, "--redis-key-file", str(own.key))


def test_files_need_a_url_with_tls(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--redis-ca-file", str(authority.certificate))
    for url in ("redis://h:1/0", "redis+sentinel://h:1/s", "redis+cluster://h:1", "unix:///run/redis.sock"):
        assert "QUIRE_REDIS_CA_FILE needs a QUIRE_REDIS_URL with TLS" in refused(capsys, *flags, url=url)
    for url in ("rediss://h:1/0", "rediss+sentinel://h:1/s", "rediss+cluster://h:1"):
        settings = read_settings(SchedulerSettings, ["--redis-url", url, *flags])
        assert settings.redis_tls == RedisTlsFiles(authority.certificate)
