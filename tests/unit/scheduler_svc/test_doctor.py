"""The scheduler's checks of `quire doctor`: of what a Redis answers, and of one that does not."""

from collections.abc import Iterator
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import redis

from ports import lasting_port
from redis_server import redis_server
from scheduler_svc import doctor
from scheduler_svc.doctor import RedisAnswers
from scheduler_svc.settings import SchedulerSettings
from svc_common.doctor.findings import CheckContext, Finding, Status

HEALTHY = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "maxmemory": 0, "aof_enabled": 1}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


def found(url: str) -> list[Finding]:
    settings = SchedulerSettings.model_validate({"redis_url": url})
    return list(doctor.check_redis(CheckContext(settings)))


def judged(ahead: float = 0, **info: Any) -> tuple[Finding, ...]:
    return tuple(doctor._findings_of("redis", RedisAnswers(HEALTHY | info, ahead)))


def test_a_healthy_redis(url: str) -> None:
    assert [finding.status for finding in found(url)] == [Status.OK, Status.OK]


def test_a_user_who_may_not_call_info(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "limited", "on", ">word", "~*", "+@all", "-info")
    _, finding = found(url.replace("://:", "://limited:").replace(url.split(":")[2].split("@")[0], "word"))
    assert (finding.status, "+info" in finding.next_step) == (Status.WARNING, True)


@pytest.mark.parametrize("rights", [["~other:*", "+@all"], ["~*", "+@all", "-@scripting"], ["~*", "+@all", "-del"]])
def test_a_user_who_may_not_do_what_a_scheduler_does(rights: list[str], url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">word", *rights)
    _, finding = found(url.replace("://:", "://limited:").replace(url.split(":")[2].split("@")[0], "word"))
    assert (finding.status, "ACL SETUSER NAME ~{PREFIX}* +@all" in finding.next_step) == (Status.WRONG, True)


def test_a_server_that_refuses_writes(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.config_set("min-replicas-to-write", 1)
        try:
            _, finding = found(url)
        finally:
            client.config_set("min-replicas-to-write", 0)
    assert (finding.status, "Not enough good replicas" in finding.problem) == (Status.WRONG, True)


def test_a_replica_is_named_as_one(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.replicaof("127.0.0.1", lasting_port())
        try:
            _, finding = found(url)
        finally:
            client.replicaof("NO", "ONE")
    assert (finding.status, "it is a replica" in finding.problem) == (Status.WRONG, True)


def test_wrong_credentials(url: str) -> None:
    (finding,) = found(f"redis://:other-word@{url.rpartition('@')[2]}")
    assert (finding.status, "user and password" in finding.next_step) == (Status.WRONG, True)
    assert "other-word" not in f"{finding}"
    (finding,) = found(f"redis://{url.rpartition('@')[2]}")
    assert (finding.status, "user and password" in finding.next_step) == (Status.WRONG, True)


def test_tls_to_a_server_without_it(url: str) -> None:
    (finding,) = found(url.replace("redis://", "rediss://"))
    assert (finding.status, "redis instead of rediss" in finding.next_step) == (Status.WRONG, True)


def test_a_server_that_does_not_run() -> None:
    (finding,) = found(f"redis://127.0.0.1:{lasting_port()}/0")
    assert (finding.status, "start Redis there" in finding.next_step) == (Status.WRONG, True)


class _EarlyRedis(StreamRequestHandler):
    """A Redis before 6.0, as far as a connection comes."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n")


def test_a_server_that_is_too_old_for_a_connection() -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), _EarlyRedis) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (finding,) = found(f"redis://127.0.0.1:{server.server_address[1]}/0")
        server.shutdown()
    assert (finding.status, "Quire needs Redis 6.2 or later" in finding.problem) == (Status.WRONG, True)
    assert "install Redis 6.2 or later" in finding.next_step


@pytest.mark.parametrize(
    ("info", "status", "words"),
    [
        ({"redis_version": "5.0.14"}, Status.WRONG, "6.2 or later"),
        ({"role": "slave", "master_host": "a", "master_port": 1}, Status.WRONG, "name its primary, a:1"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 9}, Status.WRONG, "CONFIG SET maxmemory-policy noeviction"),
        ({"maxmemory_policy": "allkeys-lru"}, Status.WARNING, "CONFIG SET maxmemory-policy noeviction"),
        ({"maxmemory": 10, "used_memory": 10}, Status.WARNING, "raise maxmemory"),
        ({"aof_enabled": 0}, Status.WARNING, "CONFIG SET appendonly yes"),
    ],
    ids=["old", "replica", "evicts", "may evict", "full", "not durable"],
)
def test_a_server_that_loses_records(info: dict[str, Any], status: Status, words: str) -> None:
    _, finding = judged(**info)
    assert finding.status is status
    assert words in f"{finding.problem} {finding.next_step}"


def test_clocks_that_differ() -> None:
    ahead, _ = judged(90)
    assert (ahead.status, "90.0 s ahead of" in ahead.found) == (Status.WARNING, True)
    behind, _ = judged(-90)
    assert "90.0 s behind" in behind.found


def test_a_file_of_record_keys_that_all_can_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "a"\nkey = "{"0" * 64}"\n')
    path.chmod(0o644)
    settings = SchedulerSettings.model_validate({"record_keys_file": path})
    (finding,) = doctor.check_record_keys(CheckContext(settings))
    assert (finding.status, "chmod" in finding.next_step) == (Status.WARNING, True)
