"""The scheduler's checks of `quire doctor`. svc_common/doctor loads this module by its name."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.connection import RedisConnections, connect
from scheduler_svc.store.scripts import StoreKeys
from svc_common.doctor.certificates import check_expiry
from svc_common.doctor.credentials import check_credentials
from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, ok, warning, wrong
from svc_common.doctor.ports import check_ports
from svc_common.doctor.redis_versions import LEAST_TEXT, is_too_old
from svc_common.files import may_others_access
from svc_common.redis_url import RedisLayout
from svc_common.service_roles import ServiceRole

_MOST_SKEW = 2.0
_NEARLY_FULL = 0.9
_CLOSE_SECONDS = 1.0
# A script that reads, and removes what is never there: it needs the permissions of the scheduler's script.
_PROBE = "redis.call('GET', KEYS[2]) redis.call('DEL', KEYS[4] .. 'doctor')"
_PERMISSIONS = "allow this user all commands on the keys of QUIRE_REDIS_PREFIX: ACL SETUSER NAME ~{PREFIX}* +@all"
_NEWER = f"install Redis {LEAST_TEXT} or later, or unset QUIRE_REDIS_URL: `make run` starts one"
_CREDENTIALS = "put user and password, and @, before the host in the URL, with special characters percent-encoded"


@dataclass(frozen=True, slots=True)
class RedisAnswers:
    """INFO of the server that has the keys, None where the user may not call it, how far its clock is ahead, and the
    error of a script that writes nothing, but may; None where there is none.
    """

    info: Mapping[str, Any] | None
    clock_ahead: float
    refusal: str | None = None


async def query(settings: SchedulerSettings) -> RedisAnswers:
    """Sends TIME, INFO and a script to the server, and changes nothing. Raises RedisError and OSError."""
    connections = connect(settings.redis_url.target, settings.redis_tls)
    try:
        node = await _node(connections, settings)
        sent = time.time()
        seconds, microseconds = await connections.client.time(**node)
        answered = time.time()
        ahead = seconds + microseconds / 1e6 - (sent + answered) / 2
        try:
            info = await connections.client.info(**node)
        except ResponseError:  # the command is forbidden or renamed
            info = None
        return RedisAnswers(info, ahead, await _refusal(connections, settings))
    finally:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await connections.close()


async def _refusal(connections: RedisConnections, settings: SchedulerSettings) -> str | None:
    """Why the server refuses a script that may write. That it is a replica is in INFO."""
    keys = StoreKeys.of(settings.redis_prefix)
    try:
        await connections.client.eval(_PROBE, len(keys), *keys)
    except ResponseError as error:
        return None if isinstance(error, ReadOnlyError) or "READONLY" in str(error) else str(error)
    return None


async def _node(connections: RedisConnections, settings: SchedulerSettings) -> dict[str, Any]:
    """Arguments of commands that lead to the node of a cluster that has the keys; none for other layouts."""
    if settings.redis_url.target.layout is not RedisLayout.CLUSTER:
        return {}
    await connections.client.initialize()
    return {"target_nodes": connections.client.get_node_from_key(StoreKeys.of(settings.redis_prefix).epoch)}


def check_redis(context: CheckContext) -> Iterator[Finding]:
    settings: SchedulerSettings = context.settings
    found = f"QUIRE_REDIS_URL {settings.redis_url}"
    try:
        answers = asyncio.run(query(settings))
    except NoPermissionError as error:
        yield wrong(found, f"the user may not do this: {error}", _PERMISSIONS)
    except AuthenticationError as error:
        step = f"{_CREDENTIALS}; or correct them there"
        yield wrong(found, f"the credentials are refused: {error}", step)
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        yield _unreachable(found, str(error), has_tls=settings.redis_url.target.has_tls)
    else:
        yield from _findings_of(found, answers)
    if settings.redis_cert_file is not None:
        yield from check_expiry("QUIRE_REDIS_CERT_FILE", settings.redis_cert_file, settings.redis_key_file)


def _unreachable(found: str, why: str, *, has_tls: bool) -> Finding:
    if "unknown command" in why and "HELLO" in why:
        return wrong(found, f"Quire needs Redis {LEAST_TEXT} or later, and this one has no command HELLO", _NEWER)
    if "AUTH" in why:
        return wrong(found, why, _CREDENTIALS)
    if "CERTIFICATE" in why or "certificate" in why:
        step = "set QUIRE_REDIS_CA_FILE to the CA of the server's certificate, and name its host in the URL"
        return wrong(found, f"the server's certificate is refused: {why}", step)
    scheme = "redis instead of rediss if it has no TLS" if has_tls else "rediss if it has TLS"
    step = f"start Redis there, or correct the URL: host, port, and {scheme}; unset, `make run` starts one"
    return wrong(found, f"it does not answer: {why}", step)


def _findings_of(found: str, answers: RedisAnswers) -> Iterator[Finding]:
    yield _clock(answers.clock_ahead)
    if answers.refusal is not None:
        step = f"correct what the error says; if it is about the user, {_PERMISSIONS}"
        yield wrong(found, f"it refuses what a scheduler does there: {answers.refusal}", step)
    info = answers.info
    if info is None:
        problem = "INFO is not allowed, so version, eviction and persistence cannot be checked"
        yield warning(found, problem, "allow it: ACL SETUSER NAME +info")
        return
    found = f"{found}, version {info.get('redis_version', 'unknown')}"
    problems = [each for each in (_version(found, info), _eviction(found, info), _persistence(found, info)) if each]
    if answers.refusal is None or problems:
        yield from problems or [ok(f"{found}, noeviction, append-only file")]


def _version(found: str, info: Mapping[str, Any]) -> Finding | None:
    if is_too_old(str(info.get("redis_version", LEAST_TEXT))):
        return wrong(found, f"Quire needs Redis {LEAST_TEXT} or later", _NEWER)
    if info.get("role") == "slave":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        step = f"name its primary, {primary}, or the sentinels, in QUIRE_REDIS_URL"
        return wrong(found, "it is a replica, which refuses writes", step)
    return None


def _eviction(found: str, info: Mapping[str, Any]) -> Finding | None:
    policy, maxmemory = info.get("maxmemory_policy", "unknown"), int(info.get("maxmemory", 0))
    if policy != "noeviction":
        step = "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        found = f"{found}, maxmemory-policy {policy}"
        if maxmemory:
            return wrong(found, f"at {maxmemory:,} bytes Redis evicts records, and requests are lost", step)
        return warning(found, "once maxmemory is set, Redis evicts records", step)
    used = int(info.get("used_memory", 0))
    if maxmemory and used > _NEARLY_FULL * maxmemory:
        step = "raise maxmemory, or lower QUIRE_RECORD_TTL"
        return warning(f"{found}, {used:,} of {maxmemory:,} bytes used", "when it is full, writes fail", step)
    return None


def _persistence(found: str, info: Mapping[str, Any]) -> Finding | None:
    if int(info.get("aof_enabled", 1)):
        return None
    step = "CONFIG SET appendonly yes, and the same in redis.conf"
    return warning(f"{found}, appendonly no", "a restart of Redis loses the records since its last snapshot", step)


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= _MOST_SKEW:
        return ok(f"the clocks of this machine and of Redis differ by {abs(ahead):.2f} s")
    problem = "expiry of keys and tokens, and the epochs of leaders, follow the clocks"
    found = f"the clock of Redis is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return warning(found, problem, "synchronize both clocks by NTP (`timedatectl set-ntp true`)")


def check_record_keys(context: CheckContext) -> Iterator[Finding]:
    settings: SchedulerSettings = context.settings
    path = settings.record_keys_file
    if path is None:
        yield ok("records in Redis are not encrypted (QUIRE_RECORD_KEYS_FILE is not set)")
    elif may_others_access(path.stat().st_mode):
        yield warning(f"{path}: keys of records", "all users of this machine can access it", f"chmod o= {path}")
    else:
        yield ok(f"{path}: keys of records")


def check_own_credentials(context: CheckContext) -> Iterator[Finding]:
    settings: SchedulerSettings = context.settings
    hosts = [settings.host, settings.scheduler_admin_host]
    dials = settings.worker_addresses
    yield from check_credentials(ServiceRole.SCHEDULER, settings, hosts, dials, "QUIRE_WORKERS_AT")


def check_own_ports(context: CheckContext) -> Iterator[Finding]:
    settings: SchedulerSettings = context.settings
    yield from check_ports(
        [
            (settings.host, settings.scheduler_port, "QUIRE_SCHEDULER_PORT"),
            (settings.scheduler_admin_host, settings.scheduler_admin_port, "QUIRE_SCHEDULER_ADMIN_PORT"),
            (settings.host, settings.scheduler_metrics_port, "QUIRE_SCHEDULER_METRICS_PORT"),
        ]
    )


GROUP = CheckGroup(
    (
        Check("redis", check_redis),
        Check("record keys", check_record_keys),
        Check("credentials", check_own_credentials),
        Check("ports", check_own_ports),
    ),
    settings=SchedulerSettings,
)
