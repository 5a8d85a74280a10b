"""The program as a user starts it, with the real Redis and placeholder programs for the three services."""

import ast
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from placeholder_services import GATEWAY, placeholder_environment, until_gone


@dataclass
class Supervisor:
    process: asyncio.subprocess.Process
    state_file: Path

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    @property
    def pids(self) -> dict[str, int]:
        return {name: role["pid"] for name, role in self.state["roles"].items()}

    async def line(self) -> str:
        assert self.process.stdout
        return (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode()


@asynccontextmanager
async def started(directory: Path, *flags: str, **variables: str) -> AsyncIterator[Supervisor]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "svc_common.supervisor", *flags),
        cwd=directory,
        env=placeholder_environment(directory) | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Supervisor(process, directory / "state.json")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_everything_comes_up_and_goes_down(services: Path) -> None:
    async with started(services) as supervisor:
        ready = await supervisor.line()
        state = supervisor.state
        assert supervisor.state_file.stat().st_mode & 0o077 == 0  # it contains the password of Redis
        assert ready.startswith("quire is ready: smollm2-135m-instruct on ")
        assert f"http://{state['http'][0]}" in ready
        assert state["grpc"][0] in ready
        assert "curl" in await supervisor.line()
        assert state["supervisor"] == supervisor.process.pid
        assert {name: role["state"] for name, role in state["roles"].items()} == dict.fromkeys(
            ("redis", "worker", "scheduler", "gateway"), "ready"
        )
        client = redis.Redis.from_url(state["redis_url"])
        assert client.ping()
        client.close()

        supervisor.process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
        assert supervisor.process.returncode == 0
        assert out == b""
        assert b"converting\n" in err
        assert b"gateway | hello from the gateway\n" in err
        await until_gone([role["pid"] for role in state["roles"].values()])
        assert not supervisor.state_file.exists()


async def test_a_killed_role_comes_back_as_another_process(services: Path) -> None:
    async with started(services) as supervisor:
        await supervisor.line()
        before = supervisor.pids
        os.kill(before["redis"], signal.SIGKILL)
        os.kill(before["scheduler"], signal.SIGKILL)
        async with asyncio.timeout(60):
            while {role["state"] for role in supervisor.state["roles"].values()} != {"ready"} or any(
                supervisor.pids[name] == before[name] for name in ("redis", "scheduler")
            ):
                await asyncio.sleep(0.02)
        assert supervisor.pids["worker"] == before["worker"]
        assert supervisor.pids["gateway"] == before["gateway"]


async def test_nothing_outlives_a_supervisor_that_is_killed(services: Path) -> None:
    async with started(services) as supervisor:
        await supervisor.line()
        pids = list(supervisor.pids.values())
        supervisor.process.kill()
        await until_gone(pids)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("QUIRE_RUN_DIR", "worker_svc/prepare.py", "{directory}/worker_svc/prepare.py/redis cannot be used: not a "),
        ("QUIRE_STATE_FILE", "none/state.json", "none/state.json: no such file or directory"),
        ("QUIRE_STATE_FILE", "worker_svc", "worker_svc: is a directory"),
        ("QUIRE_STATE_FILE", ".", ".: "),
    ],
    ids=["run dir", "no directory", "a directory", "its own directory"],
)
async def test_a_place_that_cannot_be_written_is_named_with_its_variable(
    services: Path, variable: str, value: str, message: str
) -> None:
    async with started(services, **{variable: value}) as supervisor:
        out, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert (supervisor.process.returncode, out) == (1, b"")
    assert err.decode().startswith(f"quire: {variable}: {message.format(directory=services)}")
    assert len(err.splitlines()) == 1
    assert not list(services.glob(".*state*"))


async def test_empty_places_are_as_good_as_unset(services: Path) -> None:
    async with started(services, QUIRE_STATE_FILE="", QUIRE_RUN_DIR="") as supervisor:
        assert "quire is ready" in await supervisor.line()
        supervisor.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert (services / "run" / "redis").is_dir()
    assert not (services / "redis").exists()


async def test_a_state_file_that_can_no_longer_be_written_ends_no_service(services: Path) -> None:
    folder = services / "states"
    folder.mkdir()
    async with started(services, QUIRE_STATE_FILE=str(folder / "state.json")) as supervisor:
        await supervisor.line()
        pids = {name: one["pid"] for name, one in json.loads((folder / "state.json").read_text())["roles"].items()}
        folder.rename(services / "away")  # as a disk that is full, or is not mounted any more
        os.kill(pids["scheduler"], signal.SIGKILL)
        assert supervisor.process.stderr
        said = ""
        while "scheduler answers again" not in said:
            said += (await asyncio.wait_for(supervisor.process.stderr.readline(), 60)).decode()
        supervisor.process.send_signal(signal.SIGTERM)
        _, rest = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 0
    assert (said + rest.decode()).count("state.json cannot be written: no such file or directory") == 1
    await until_gone(pids.values())


@pytest.mark.parametrize("variable", ["HTTP", "WORKER_METRICS"])
async def test_a_port_in_use_ends_it_with_the_variable(services: Path, variable: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        flag = f"--{variable.lower().replace('_', '-')}-port"
        async with started(services, flag, str(port)) as supervisor:
            out, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 1
    assert out == b""
    assert err.decode().startswith(f"quire: 127.0.0.1:{port} is already in use")
    assert f"QUIRE_{variable}_PORT" in err.decode()
    assert len(err.splitlines()) == 1


async def test_a_model_that_is_not_there_ends_it_before_anything_starts(services: Path) -> None:
    async with started(services, "--model", "/no/such/model") as supervisor:
        _, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 1
    assert err == b"quire: there is no model at /no/such/model\n"


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        (("--revision", "v1"), "QUIRE_REVISION"),
        (("--tokenizer", "./gone"), "QUIRE_TOKENIZER"),
        (("--tokenizer-revision", "v1"), "QUIRE_TOKENIZER_REVISION"),
    ],
)
async def test_a_revision_or_tokenizer_that_can_be_none_is_named(
    services: Path, flags: tuple[str, ...], variable: str
) -> None:
    async with started(services, *flags) as supervisor:
        _, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 1
    assert err.decode().startswith(f"quire: {variable}")
    assert len(err.splitlines()) == 1


async def test_roles_get_the_settings_of_the_prepared_model(services: Path) -> None:
    """The supervisor's own settings are passed to prepare, and unknown variables to every role."""
    report = "import os, sys; print({k: v for k, v in os.environ.items() if k in NAMES}, file=sys.stderr, flush=True)"
    names = ("QUIRE_MODEL", "QUIRE_REVISION", "QUIRE_TOKENIZER", "QUIRE_MAX_MODEL_LEN", "QUIRE_GENERATION_CONFIG")
    (services / "worker_svc" / "prepare.py").write_text(f"NAMES = {names}; {report}")
    (services / "gateway_svc" / "__main__.py").write_text(f"NAMES = {names}; {report}\n{GATEWAY}")
    flags = ("--model", "owner/name", "--revision", "v1", "--tokenizer", "other/one")
    variables = {"QUIRE_MAX_MODEL_LEN": "64", "QUIRE_GENERATION_CONFIG": "model"}
    async with started(services, *flags, **variables) as supervisor:
        await supervisor.line()
        supervisor.process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    expected = {"QUIRE_MODEL": "owner/name", "QUIRE_REVISION": "v1", "QUIRE_TOKENIZER": "other/one", **variables}
    for line in err.decode().splitlines():
        if "QUIRE_MODEL" in line:
            assert ast.literal_eval(line.removeprefix("gateway | ")) == expected
    assert err.decode().count("QUIRE_MODEL") == 2


async def test_a_file_of_models_is_prepared_entry_by_entry_and_listed_when_ready(services: Path) -> None:
    (services / "worker_svc" / "prepare.py").write_text(
        "import os, sys; print('prepares', os.environ.get('QUIRE_MODEL'), file=sys.stderr)"
    )
    (services / "models.toml").write_text(
        '[[models]]\nserved_model_name = "a,b"\n[[models]]\nmodel = "owner/name"\nworkers = 2\n'
    )
    async with started(services, "--models", "models.toml") as supervisor:
        ready = await supervisor.line()
        assert ready.startswith("quire is ready: a (also b), owner/name on ")
        assert '"model": "a"' in await supervisor.line()
        workers = [name for name in supervisor.pids if name.startswith("worker")]
        assert workers == ["worker-a-0", "worker-owner/name-0", "worker-owner/name-1"]
        assert len(supervisor.state["workers"]) == 3
        supervisor.process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert [line for line in err.decode().splitlines() if "prepares" in line] == [
        "prepares None",
        "prepares owner/name",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nmodle = 3", "models[0].modle is not a key"),
        ('[[models]]\n[[models]]\nmodel = "owner/name"\ntokenizer = "./gone"', "models[1]: QUIRE_TOKENIZER: "),
    ],
)
async def test_mistakes_in_a_file_of_models_end_it_before_anything_starts(
    services: Path, text: str, message: str
) -> None:
    (services / "models.toml").write_text(text)
    async with started(services, "--models", "models.toml") as supervisor:
        _, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 1
    assert err.decode().startswith(f"quire: models.toml: {message}")
    assert len(err.splitlines()) == 1


async def test_a_role_that_cannot_start_ends_it_with_its_last_words(services: Path) -> None:
    (services / "scheduler_svc" / "__main__.py").write_text("raise SystemExit('QUIRE_REDIS_URL: no')")
    async with started(services) as supervisor:
        out, err = await asyncio.wait_for(supervisor.process.communicate(), 60)
    assert supervisor.process.returncode == 1
    assert out == b""
    assert b"quire: scheduler died (exit status 1) and never answered; its last lines:" in err
    assert err.endswith(b"scheduler | QUIRE_REDIS_URL: no\n")
