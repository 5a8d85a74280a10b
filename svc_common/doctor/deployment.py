"""Checks of what `make run` and `quire serve` set up: ports of all roles, embedded Redis, the deployment's secret."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from svc_common.doctor.directories import is_writable
from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, ok, skipped, warning, wrong
from svc_common.doctor.ports import check_ports, check_socket_path
from svc_common.doctor.prepared import next_step_for
from svc_common.doctor.redis_versions import LEAST_TEXT, is_too_old
from svc_common.doctor.role_settings import read_role_settings
from svc_common.identity import SECRET_FILE, InvalidCredentials, read_secret
from svc_common.model_settings import InvalidModelsFile, ModelSettings
from svc_common.models import ModelNotFound
from svc_common.server import CannotListen
from svc_common.settings import InvalidSettings, parse_settings
from svc_common.supervisor.addresses import FreePorts, assign
from svc_common.supervisor.embedded_redis import RedisNotFound, find_executable
from svc_common.supervisor.settings import SupervisorSettings

_VERSION_SECONDS = 5.0


def _settings() -> SupervisorSettings | None:
    """None where they are invalid, which `check_settings` reports."""
    try:
        return parse_settings(SupervisorSettings, [])
    except InvalidSettings:
        return None


def _models(settings: SupervisorSettings) -> list[ModelSettings]:
    try:
        return settings.model_settings()
    except InvalidModelsFile:
        return []


def check_settings(_: CheckContext) -> Iterator[Finding]:
    settings, findings = read_role_settings(SupervisorSettings)
    if settings is None:
        yield from findings
        return
    try:
        models = settings.model_settings()
        for model in models:
            model.check()
    except InvalidModelsFile as error:
        yield wrong("QUIRE_MODELS", str(error), "correct the file; docs/operations.md, Several models, describes it")
    except ModelNotFound as error:
        yield wrong("QUIRE_MODEL", str(error), next_step_for(error))
    else:
        yield from findings


def check_all_ports(_: CheckContext) -> Iterator[Finding]:
    settings = _settings()
    if settings is None or not (models := _models(settings)):
        yield skipped("the settings are wrong")
        return
    # A port of 0 is one that is free when its role starts.
    names = (name for name in SupervisorSettings.model_fields if name.endswith("_port") and getattr(settings, name))
    fixed = {f"QUIRE_{name.upper()}" for name in names}
    try:
        with FreePorts() as free_ports:
            addresses = assign(settings, models, free_ports)
    except (CannotListen, ModelNotFound) as error:
        yield wrong("ports", str(error), "set QUIRE_WORKER_PORT and QUIRE_SCHEDULER_PORT to free ports")
        return
    yield from check_ports([(one.host, one.port, one.variable) for one in addresses.ports if one.variable in fixed])
    for unix in addresses.unix_sockets:
        yield from check_socket_path(unix.path)


def check_embedded_redis(_: CheckContext) -> Iterator[Finding]:
    settings = _settings()
    if settings is None:
        yield skipped("the settings are wrong")
        return
    if settings.redis_url is not None:
        yield ok(f"QUIRE_REDIS_URL is {settings.redis_url}: see the scheduler's check `redis`")
        return
    try:
        executable = find_executable()
    except RedisNotFound as error:
        step = "apt-get install redis-server, or set QUIRE_REDIS_URL to a Redis that runs"
        yield wrong("no redis-server", str(error), step)
        return
    called = subprocess.run(
        [executable, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
    )
    version = called.stdout.partition("v=")[2].partition(" ")[0]
    found = f"embedded: {executable}, version {version or 'unknown'}"
    if called.returncode != 0 or not version:
        step = "install Redis again, or set QUIRE_REDIS_URL to a Redis that runs"
        yield wrong(found, f"it cannot be run: {called.stderr.strip()[-200:] or 'it prints no version'}", step)
    elif is_too_old(version):
        step = f"install Redis {LEAST_TEXT} or later, or set QUIRE_REDIS_URL to one that runs"
        yield wrong(found, f"Quire needs Redis {LEAST_TEXT} or later", step)
    else:
        yield ok(found)


def check_run_dir(_: CheckContext) -> Iterator[Finding]:
    settings = _settings()
    if settings is None:
        yield skipped("the settings are wrong")
        return
    directory = settings.run_dir.absolute()
    found = f"{directory} (QUIRE_RUN_DIR)"
    if not is_writable(directory):
        step = "make it a directory that this user can write to, or set QUIRE_RUN_DIR to another one"
        yield wrong(found, "it cannot be made, or not written to", step)
    elif settings.redis_url is None and _is_locked(directory / "redis" / "lock"):
        step = "stop that Quire, or set QUIRE_RUN_DIR to another directory"
        yield wrong(found, "another Quire that runs keeps its data there", step)
    else:
        yield ok(found)


def _is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file. The lock is taken for a moment, if it is free."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def check_secret(_: CheckContext) -> Iterator[Finding]:
    settings = _settings()
    if settings is None:
        yield skipped("the settings are wrong")
        return
    path = settings.deployment_secret_file or settings.run_dir / SECRET_FILE
    if settings.insecure:
        problem = "inner ports check nobody: every user of this machine may call them"
        yield warning("QUIRE_INSECURE is set", problem, "unset QUIRE_INSECURE: `make run` makes a secret by itself")
    elif settings.deployment_secret_file is None and not path.exists():
        yield ok(f"{path} is made at the first start")
    else:
        try:
            read_secret(path)
        except InvalidCredentials as error:
            step = "unset QUIRE_DEPLOYMENT_SECRET_FILE and remove the file, and `make run` makes one; or correct it"
            yield wrong("QUIRE_DEPLOYMENT_SECRET_FILE", str(error), step)
        else:
            yield ok(f"{path}, which only its owner and group can read")


GROUP = CheckGroup(
    (
        Check("settings", check_settings),
        Check("ports", check_all_ports),
        Check("redis", check_embedded_redis),
        Check("run directory", check_run_dir),
        Check("secret", check_secret),
    )
)
