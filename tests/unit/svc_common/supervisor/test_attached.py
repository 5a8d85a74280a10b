"""The program that `quire run` starts, with the real Redis and placeholder programs for the three services."""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from placeholder_services import alive, placeholder_environment, until_gone
from svc_common.supervisor.attached import LOG_FILE


class Attached:
    """A running one."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self._directory = directory

    async def report(self) -> dict[str, Any]:
        """Its next report."""
        assert self.process.stdout
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        values: dict[str, Any] = json.loads(line)
        return values

    async def end(self) -> tuple[int | None, str]:
        """Closes its standard input. Returns its exit status and what it wrote to stderr."""
        assert self.process.stdin
        self.process.stdin.close()
        _, errors = await asyncio.wait_for(self.process.communicate(), 60)
        return self.process.returncode, errors.decode()

    @property
    def pids(self) -> list[int]:
        """The processes of all services."""
        roles = json.loads((self._directory / "state.json").read_text())["roles"]
        return [role["pid"] for role in roles.values()]

    @property
    def log(self) -> str:
        """Lines of the services."""
        return (self._directory / "run" / LOG_FILE).read_text()


@asynccontextmanager
async def started(directory: Path, *arguments: str, **variables: str) -> AsyncIterator[Attached]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "svc_common.supervisor.attached", *arguments),
        cwd=directory,
        env=placeholder_environment(directory) | variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Attached(process, directory)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_it_reports_prompt_and_addresses_and_ends_with_its_input(services: Path) -> None:
    async with started(services, "--api-key", "sesame-open-now", "--gateways=2", "owner/name", "Why?") as attached:
        assert await attached.report() == {"prompt": "Why?"}
        ready = await attached.report()
        state = json.loads((services / "state.json").read_text())
        assert ready == {
            "model": "owner/name",
            "generates": True,
            "address": ",".join(state["grpc"]),
            "http": ", ".join(f"http://{one}" for one in state["http"]),
            "api_key": "sesame-open-now",
            "log": f"run/{LOG_FILE}",
        }
        pids = attached.pids
        assert len(pids) == 5

        assert await attached.end() == (0, "converting\n")
        await until_gone(pids)
    assert "gateway-0 | hello from the gateway\n" in attached.log
    assert (services / "run" / LOG_FILE).stat().st_mode & 0o777 == 0o600


async def test_the_log_of_an_earlier_run_is_replaced(services: Path) -> None:
    path = services / "run" / LOG_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text("an earlier run\n")
    path.chmod(0o644)
    async with started(services) as attached:
        await attached.report()
        await attached.report()
        await attached.end()
        assert "an earlier run" not in attached.log
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_second_one_in_the_directory_leaves_the_log_of_the_first(services: Path) -> None:
    async with started(services) as first:
        await first.report()
        await first.report()
        async with started(services) as second:
            code, errors = await second.end()
        assert code == 2
        assert errors == (
            f"quire run: QUIRE_RUN_DIR: another `quire run` writes run/{LOG_FILE}; end it, or set QUIRE_RUN_DIR to "
            "another directory\n"
        )
        assert "hello from the gateway" in first.log
        await first.end()


async def test_a_log_that_can_no_longer_be_written_ends_nothing(services: Path) -> None:
    async with started(services) as attached:
        await attached.report()
        await attached.report()
        pids = attached.pids
        # As a full disk: the log has reached this size.
        resource.prlimit(attached.process.pid, resource.RLIMIT_FSIZE, (1, 1))
        os.kill(pids[2], signal.SIGKILL)
        async with asyncio.timeout(60):
            while alive(pids[2]):
                await asyncio.sleep(0.01)
        status, errors = await attached.end()
        assert "Traceback" not in errors
        assert status == 0
        await until_gone(pids)


async def test_an_input_that_is_closed_at_once_starts_nothing_that_stays(services: Path) -> None:
    # Runs until the end of the input is seen.
    (services / "worker_svc" / "prepare.py").write_text("import time; time.sleep(3_600)")
    async with started(services) as attached:
        assert await attached.end() == (0, "")
    assert not (services / "state.json").exists()


async def test_nothing_outlives_it_if_it_is_killed(services: Path) -> None:
    async with started(services) as attached:
        assert await attached.report() == {"prompt": None}
        await attached.report()
        pids = attached.pids
        attached.process.kill()
        await until_gone(pids)


async def test_a_service_that_cannot_start_ends_it_with_its_last_lines(services: Path) -> None:
    (services / "scheduler_svc" / "__main__.py").write_text("raise SystemExit('QUIRE_REDIS_URL: no')")
    async with started(services) as attached:
        await attached.report()
        assert attached.process.stdout
        assert await asyncio.wait_for(attached.process.stdout.read(), 60) == b""
        code, errors = await attached.end()
    assert code == 1
    assert "quire: scheduler died (exit status 1) and never answered; its last lines:\n" in errors
    assert errors.endswith("scheduler | QUIRE_REDIS_URL: no\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        (("model", "Why", "not?"), {}, "quire run: not?: there is one MODEL and one PROMPT; quote a prompt"),
        (("model", "--enable-lora"), {}, "quire run: --enable-lora is not served: adapters are not served"),
        (("--http-port", "many"), {}, "quire run: --http-port: input should be a valid integer"),
        (("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"), {}, "quire run: QUIRE_TLS_CERT_FILE: the chat needs"),
        (
            (),
            {"QUIRE_RUN_DIR": "/dev/null/run"},
            "quire run: QUIRE_RUN_DIR: /dev/null/run/server.log cannot be written",
        ),
    ],
)
async def test_a_mistake_is_one_line_and_exit_status_2(
    services: Path, arguments: tuple[str, ...], variables: dict[str, str], text: str
) -> None:
    async with started(services, *arguments, **variables) as attached:
        code, errors = await attached.end()
    assert code == 2
    assert text in errors
    assert len(errors.splitlines()) == 1
