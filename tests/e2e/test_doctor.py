"""`quire doctor` names what is wrong with set-ups that are broken on purpose, and what to do about each."""

import json
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from certificates import Authority
from environments import bare_environment
from ports import lasting_port
from redis_server import redis_server
from svc_common.identity import make_secret
from svc_common.service_roles import ServiceRole

PORTS = (
    *("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS"),
    "GATEWAY_METRICS",
)
Variables = Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """What `quire doctor --json` printed."""

    code: int
    findings: list[dict[str, str]]

    def named(self, *statuses: str) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["status"] in statuses]

    def of(self, role: str, check: str) -> dict[str, str]:
        """The finding of a check that is not ok."""
        (finding,) = (each for each in self.named("wrong", "warning") if (each["role"], each["check"]) == (role, check))
        return finding


def environment(directory: Path, variables: Variables) -> dict[str, str]:
    """That of a machine on which nothing else runs."""
    secret = directory / "secret"
    if not secret.exists():
        make_secret(secret)
    own = {f"QUIRE_{port}_PORT": "0" for port in PORTS} | {"QUIRE_DEPLOYMENT_SECRET_FILE": str(secret)}
    return {**bare_environment("QUIRE_CACHE_DIR"), **own, **variables}


def doctor(directory: Path, variables: Variables, *arguments: str) -> Report:
    """Runs the command in a directory, in which it must not change anything."""
    given = environment(directory, variables)
    before = sorted(directory.rglob("*"))
    command = [sys.executable, "-m", "quire_client", "doctor", "--json", *arguments]
    ended = subprocess.run(command, cwd=directory, env=given, capture_output=True, text=True, timeout=600)
    assert "Traceback" not in ended.stderr
    report = json.loads(ended.stdout)
    assert report["ok"] is (ended.returncode == 0)
    assert sorted(directory.rglob("*")) == before
    return Report(ended.returncode, report["findings"])


# Broken set-ups. Each makes what it needs in a directory, and yields the variables that lead there.

SetUp = Callable[[Path, Path], AbstractContextManager[Variables]]


@contextmanager
def no_compiler(directory: Path, model: Path) -> Iterator[Variables]:
    (directory / "bin").mkdir()
    yield {"QUIRE_MODEL": str(model), "QUIRE_KERNELS": "compiled", "PATH": str(directory / "bin"), "CXX": ""}


@contextmanager
def unwritable_kernel_cache(directory: Path, model: Path) -> Iterator[Variables]:
    (directory / "file").touch()
    yield {"QUIRE_MODEL": str(model), "QUIRE_KERNEL_CACHE_DIR": str(directory / "file" / "kernels")}


@contextmanager
def no_weights(directory: Path, model: Path) -> Iterator[Variables]:
    copy = shutil.copytree(model, directory / "model")
    (copy / "model.safetensors").unlink()
    yield {"QUIRE_MODEL": str(copy)}


@contextmanager
def missing_shard(directory: Path, model: Path) -> Iterator[Variables]:
    copy = shutil.copytree(model, directory / "model")
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {f"tensor-{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    yield {"QUIRE_MODEL": str(copy)}


@contextmanager
def unknown_architecture(directory: Path, model: Path) -> Iterator[Variables]:
    copy = shutil.copytree(model, directory / "model")
    (copy / "config.json").write_text(json.dumps({"model_type": "unheard-of", "architectures": ["UnheardOf"]}))
    yield {"QUIRE_MODEL": str(copy)}


@contextmanager
def too_little_memory(directory: Path, model: Path) -> Iterator[Variables]:
    yield {"QUIRE_MODEL": str(model), "QUIRE_CPU_KV_BYTES": str(2**50)}


@contextmanager
def too_little_for_a_block(directory: Path, model: Path) -> Iterator[Variables]:
    yield {"QUIRE_MODEL": str(model), "QUIRE_CPU_KV_BYTES": "1000"}


@contextmanager
def bad_setting(directory: Path, model: Path) -> Iterator[Variables]:
    yield {"QUIRE_MODEL": str(model), "QUIRE_BLOCK_SIZE": "7"}


@contextmanager
def redis_down(directory: Path, model: Path) -> Iterator[Variables]:
    yield {"QUIRE_REDIS_URL": f"redis://:a-password@127.0.0.1:{lasting_port()}/0"}


class _OldRedis(socketserver.StreamRequestHandler):
    """Answers TIME and INFO as Redis 5 did, and anything else with +OK."""

    def handle(self) -> None:
        info = b"# Server\r\nredis_version:5.0.14\r\nmaxmemory_policy:noeviction\r\naof_enabled:1\r\n"
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:])).upper())
                self.rfile.readline()
            if words[0] == b"INFO":
                self.wfile.write(b"$%d\r\n%s\r\n" % (len(info), info))
            elif words[0] == b"TIME":
                self.wfile.write(b"*2\r\n$10\r\n%d\r\n$1\r\n0\r\n" % time.time())
            else:
                self.wfile.write(b"+OK\r\n")


@contextmanager
def old_redis(directory: Path, model: Path) -> Iterator[Variables]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldRedis) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"QUIRE_REDIS_URL": f"redis://127.0.0.1:{server.server_address[1]}/0"}
        server.shutdown()


@contextmanager
def evicting_redis(directory: Path, model: Path) -> Iterator[Variables]:
    with redis_server(directory.with_name(f"{directory.name}-redis")) as url:
        with redis.Redis.from_url(url) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        yield {"QUIRE_REDIS_URL": url}


@contextmanager
def wrong_password(directory: Path, model: Path) -> Iterator[Variables]:
    with redis_server(directory.with_name(f"{directory.name}-redis")) as url:
        yield {"QUIRE_REDIS_URL": f"redis://:a-password@{url.rpartition('@')[2]}"}


@contextmanager
def port_taken(directory: Path, model: Path) -> Iterator[Variables]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"QUIRE_MODEL": str(model), "QUIRE_HTTP_PORT": str(server.getsockname()[1])}


@contextmanager
def expired_certificate(directory: Path, model: Path) -> Iterator[Variables]:
    made = Authority(directory).issue("host", ["DNS:host"], days=0)
    yield {
        "QUIRE_MODEL": str(model),
        "QUIRE_TLS_CERT_FILE": str(made.certificate),
        "QUIRE_TLS_KEY_FILE": str(made.key),
    }


@contextmanager
def key_of_another_certificate(directory: Path, model: Path) -> Iterator[Variables]:
    authority = Authority(directory)
    made, other = authority.issue("host", ["DNS:host"], days=40), authority.issue("other", ["DNS:other"])
    yield {
        "QUIRE_MODEL": str(model),
        "QUIRE_TLS_CERT_FILE": str(made.certificate),
        "QUIRE_TLS_KEY_FILE": str(other.key),
    }


@contextmanager
def certificate_of_another_role(directory: Path, model: Path) -> Iterator[Variables]:
    made = Authority(directory).issue_for(ServiceRole.WORKER, days=40)
    yield {"QUIRE_MODEL": str(model), "QUIRE_DEPLOYMENT_SECRET_FILE": "", **made.variables}


@contextmanager
def bad_key_file(directory: Path, model: Path) -> Iterator[Variables]:
    keys = directory / "keys.toml"
    keys.write_text('[[keys]]\nkey = "a-key-of-many-characters"\n')
    yield {"QUIRE_MODEL": str(model), "QUIRE_API_KEYS": str(keys)}


LONG = (unwritable_kernel_cache, missing_shard, too_little_memory)
"""What other cases find in the same way."""
CASES: list[tuple[SetUp, str, str, str, str, str]] = [
    (no_compiler, "worker", "kernels", "wrong", "no C++ compiler is found", "apt-get install g++"),
    (unwritable_kernel_cache, "worker", "kernels", "warning", "cannot be kept there", "set QUIRE_KERNEL_CACHE_DIR"),
    (no_weights, "worker", "model", "wrong", "it has no model.safetensors", "copy the missing files"),
    (missing_shard, "worker", "model", "wrong", "model-00002-of-00002.safetensors", "download the model's files again"),
    (unknown_architecture, "worker", "model", "wrong", "UnheardOf", "set QUIRE_MODEL"),
    (too_little_memory, "worker", "memory", "warning", "QUIRE_CPU_KV_BYTES is", "lower it to"),
    (too_little_for_a_block, "worker", "memory", "wrong", "no memory is left", "raise QUIRE_CPU_KV_BYTES"),
    (bad_setting, "worker", "settings", "wrong", "QUIRE_BLOCK_SIZE (--block-size): ", "set the variable"),
    (redis_down, "scheduler", "redis", "wrong", "it does not answer", "start Redis there"),
    (old_redis, "scheduler", "redis", "wrong", "Redis 6.2 or later", "install Redis 6.2"),
    (evicting_redis, "scheduler", "redis", "wrong", "allkeys-lru", "CONFIG SET maxmemory-policy noeviction"),
    (wrong_password, "scheduler", "redis", "wrong", "credentials", "put user and password"),
    (port_taken, "gateway", "ports", "wrong", "is held by", "QUIRE_HTTP_PORT"),
    (expired_certificate, "gateway", "tls", "wrong", "expired", "issue a new certificate"),
    (key_of_another_certificate, "gateway", "tls", "wrong", "cannot be used with the key", "of its own key"),
    (certificate_of_another_role, "gateway", "credentials", "wrong", "quire://role/gateway", "of the gateway"),
    (bad_key_file, "gateway", "keys", "wrong", "keys[0]", "docs/api.md"),
]


@pytest.mark.parametrize(
    ("set_up", "role", "check", "status", "problem", "step"),
    [pytest.param(*case, id=case[0].__name__, marks=pytest.mark.large if case[0] in LONG else ()) for case in CASES],
)
def test_a_broken_set_up_is_named(
    set_up: SetUp, role: str, check: str, status: str, problem: str, step: str, tmp_path: Path, tiny_model: Path
) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    with set_up(directory, tiny_model) as variables:
        report = doctor(directory, variables, "--role", role)
    finding = report.of(role, check)
    assert finding["status"] == status
    assert problem in f"{finding.get('found')} {finding['problem']}"
    assert step in finding["next_step"]
    assert report.code == (status == "wrong")
    assert "a-password" not in str(report.findings)
    assert "a-key-of" not in str(report.findings)
    others = [(each["role"], each["check"]) for each in report.named("wrong") if each != finding]
    assert others == []


def test_in_a_healthy_set_up_nothing_is_wrong(tmp_path: Path, tiny_model: Path) -> None:
    report = doctor(tmp_path, {"QUIRE_RUN_DIR": str(tmp_path / "run")}, str(tiny_model))
    assert report.named("wrong") == []
    assert report.code == 0
    assert {each["role"] for each in report.findings} == {"installation", "make run", "gateway", "scheduler", "worker"}


def test_several_things_are_named_at_once(tmp_path: Path) -> None:
    """Wrong settings of `make run` leave the checks of the roles whose settings are right."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables: dict[str, Any] = {
            "QUIRE_WORKERS": "0",
            "QUIRE_MODEL": "/no/such/model",
            "QUIRE_SCHEDULER_METRICS_PORT": str(server.getsockname()[1]),
            "QUIRE_API_KEYS": "/no/such/file",
        }
        report = doctor(tmp_path, variables)
    assert report.code == 1
    assert "QUIRE_WORKERS" in report.of("make run", "settings")["problem"]
    assert "/no/such/file" in report.of("gateway", "keys")["problem"]
    assert "/no/such/model" in report.of("worker", "model")["problem"]


def test_modules_in_the_working_directory_are_not_used(tmp_path: Path) -> None:
    for name in ("svc_common", "gateway_svc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the working directory')")
    command = [sys.executable, "-P", "-m", "quire_client", "doctor", "--json", "--role", "gateway"]
    given = environment(tmp_path, {})
    ended = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=600)
    findings = json.loads(ended.stdout)["findings"]
    assert "working directory" not in ended.stdout + ended.stderr
    assert {"gateway", "installation"} <= {each["role"] for each in findings}
    assert not list(tmp_path.rglob("__pycache__"))


def test_without_torch_the_other_roles_are_checked(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    report = doctor(tmp_path, {"PYTHONPATH": str(tmp_path)}, str(tiny_model))
    assert {each["role"] for each in report.named("wrong")} == {"worker"}
    assert "libtorch.so" in report.of("worker", "device")["found"]
    assert {"processor", "profiles"} <= {each["check"] for each in report.named("ok") if each["role"] == "worker"}
    assert {"models", "keys"} <= {each["check"] for each in report.named("ok", "warning") if each["role"] == "gateway"}


def test_the_text_has_a_line_for_each_finding(tmp_path: Path) -> None:
    with port_taken(tmp_path, tmp_path) as variables:
        given = environment(tmp_path, variables) | {"COLUMNS": "200"}
        command = [sys.executable, "-m", "quire_client", "doctor", "--role", "gateway", "--http-port", "0", "--port"]
        ended = subprocess.run(
            [*command, variables["QUIRE_HTTP_PORT"]], cwd=tmp_path, env=given, capture_output=True, text=True
        )
    assert ended.returncode == 1
    assert "is held by" in ended.stdout
    assert re.search(r"^ok +installation +python ", ended.stdout, re.MULTILINE)
    assert re.search(r"^\d+ ok, \d wrong$", ended.stdout, re.MULTILINE)
