"""A supervisor over small roles, each a real process: start, restart, failure, and stop in order."""

import asyncio
import io
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from svc_common.supervisor.console import Console
from svc_common.supervisor.group import RoleGroup
from svc_common.supervisor.prepare import PrepareFailed, prepare_model
from svc_common.supervisor.roles import Role, StartTier
from svc_common.supervisor.runner import RestartPolicy, RoleFailed

POLICY = RestartPolicy(initial_backoff=0.05, max_backoff=0.1, probe_interval=0.02)

# The file with its process id means that it is ready. It also records the order in which roles end.
SERVES = """
trap 'echo {name} >> ended; exit 0' TERM
echo $$ > {name}.up
while :; do sleep 0.02; done
"""


def role(name: str, tier: StartTier, script: str = SERVES, *, shows_output: bool = True) -> Role:
    async def probe() -> bool:
        return Path(f"{name}.up").exists()

    return Role(name, tier, ("sh", "-c", script.format(name=name)), probe, shows_output=shows_output)


@dataclass
class Run:
    group: RoleGroup
    task: "asyncio.Task[None]"
    said: io.StringIO
    announced: asyncio.Event
    snapshots: list[dict[str, Any]]

    async def until(self, seen: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not seen():
                await asyncio.sleep(0.01)

    def pid(self, name: str) -> int:
        return int(self.group.snapshot()["roles"][name]["pid"])

    async def kill(self, name: str) -> None:
        """Kills a role and waits until its next process is ready."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: self.state(name) == "ready" and self.pid(name) != pid)

    def state(self, name: str) -> str:
        return str(self.group.snapshot()["roles"][name]["state"])


async def nothing() -> None:
    pass


@asynccontextmanager
async def running(
    roles: list[Role],
    prepare: Callable[[], Any] = nothing,
    stop_seconds: float = 20,
    policy: RestartPolicy = POLICY,
) -> AsyncIterator[Run]:
    said = io.StringIO()
    snapshots: list[dict[str, Any]] = []
    announced = asyncio.Event()
    group = RoleGroup(roles, Console(said), policy=policy, stop_seconds=stop_seconds, on_change=snapshots.append)
    task = asyncio.create_task(group.run(prepare=prepare, announce=announced.set))
    run = Run(group, task, said, announced, snapshots)
    try:
        yield run
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


ROLES = [
    role("redis", StartTier.STORE),
    role("worker", StartTier.WORKER),
    role("scheduler", StartTier.SCHEDULER),
    role("gateway", StartTier.GATEWAY),
]


@pytest.fixture
def _without_nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_without_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_takes_roles_down_from_the_top(number: signal.Signals) -> None:
    async with running(ROLES) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        pids = [run.pid(role.name) for role in ROLES]
        os.kill(os.getpid(), number)
        await asyncio.wait_for(run.task, 60)
    assert Path("ended").read_text().split() == ["gateway", "scheduler", "worker", "redis"]
    assert not any(alive(pid) for pid in pids)
    assert {role["state"] for role in run.snapshots[-1]["roles"].values()} == {"ended"}
    assert {role["pid"] for role in run.snapshots[-1]["roles"].values()} == {None}


async def test_services_start_when_the_store_answers() -> None:
    # The worker exits unless the store is ready.
    worker = role("worker", StartTier.WORKER, "test -f redis.up || exit 1\n" + SERVES)
    store = role("redis", StartTier.STORE, "sleep 0.3\n" + SERVES)
    async with running([worker, store]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        assert run.group.snapshot()["roles"]["worker"]["restarts"] == 0


async def test_ready_is_announced_when_every_role_answers() -> None:
    late = role("gateway", StartTier.GATEWAY, "while ! test -f go; do sleep 0.02; done\n" + SERVES)
    async with running([role("worker", StartTier.WORKER), late]) as run:
        await run.until(lambda: run.state("worker") == "ready")
        assert run.state("gateway") == "starting"
        assert not run.announced.is_set()
        Path("go").touch()
        await asyncio.wait_for(run.announced.wait(), 60)
    assert [snapshot["ready"] for snapshot in run.snapshots].index(True) > 0


async def test_a_dead_role_starts_again_and_the_others_stay() -> None:
    async with running(ROLES) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        gateway = run.pid("gateway")
        await run.kill("worker")
        assert run.pid("gateway") == gateway
        assert run.group.snapshot()["roles"]["worker"]["restarts"] == 1
    assert "worker died (SIGKILL); starting it again at once" in run.said.getvalue()
    assert "worker answers again" in run.said.getvalue()


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open no file, as where it has too many."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_role_that_cannot_be_started_again_now_is_started_later() -> None:
    async with running([role("worker", StartTier.WORKER), role("gateway", StartTier.GATEWAY)]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        with no_more_files():
            os.kill(run.pid("worker"), signal.SIGKILL)
            await run.until(lambda: run.group.snapshot()["roles"]["worker"]["restarts"] >= 3)
            assert not run.task.done()
        await run.until(lambda: run.state("worker") == "ready")
        assert run.state("gateway") == "ready"
    assert "worker could not be started (too many open files); starting it again in 0.05 s" in run.said.getvalue()


async def test_a_role_that_can_never_be_started_stops_everything() -> None:
    async with running([role("worker", StartTier.WORKER)]) as run:
        with no_more_files(), pytest.raises(RoleFailed, match="worker could not be started"):
            await asyncio.wait_for(run.task, 60)


async def test_a_role_that_was_ready_is_always_restarted_with_growing_delays() -> None:
    breaks = "test -f break && exit 7\n" + SERVES
    async with running([role("worker", StartTier.WORKER, breaks)]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        Path("break").touch()
        os.kill(run.pid("worker"), signal.SIGKILL)
        await run.until(lambda: run.group.snapshot()["roles"]["worker"]["restarts"] >= 5)
        assert not run.task.done()
        Path("break").unlink()
        await run.until(lambda: run.state("worker") == "ready")
    waits = [line.rsplit("again ", 1)[1] for line in run.said.getvalue().splitlines() if "starting it" in line]
    assert waits[:4] == ["at once", "in 0.05 s", "in 0.1 s", "in 0.1 s"]


async def test_a_role_that_stayed_up_starts_at_once_again() -> None:
    settled_at_once = replace(POLICY, stable_after=0.0)
    async with running([role("worker", StartTier.WORKER)], policy=settled_at_once) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        for _ in range(3):
            await run.kill("worker")
    waits = [line.rsplit("again ", 1)[1] for line in run.said.getvalue().splitlines() if "starting it" in line]
    assert waits == ["at once"] * 3


async def test_a_role_that_dies_again_and_again_at_start_stops_everything() -> None:
    broken = role("worker", StartTier.WORKER, "echo no such model >&2; exit 1")
    async with running([role("redis", StartTier.STORE), broken]) as run:
        with pytest.raises(RoleFailed, match=r"worker died \(exit status 1\) and never answered") as raised:
            await asyncio.wait_for(run.task, 60)
    assert raised.value.last_lines == ["no such model"] * 3
    assert Path("ended").read_text().split() == ["redis"]
    assert not run.announced.is_set()


async def test_bad_settings_are_not_tried_again() -> None:
    async with running([role("worker", StartTier.WORKER, "echo QUIRE_DTYPE: not a dtype >&2; exit 2")]) as run:
        with pytest.raises(RoleFailed) as raised:
            await asyncio.wait_for(run.task, 60)
    assert raised.value.last_lines == ["QUIRE_DTYPE: not a dtype"]


async def test_a_role_that_does_not_end_is_killed_with_its_children() -> None:
    stubborn = "trap '' TERM\nsleep 600 &\necho $! > child\necho > {name}.up\nwait"
    async with running([role("worker", StartTier.WORKER, stubborn)], stop_seconds=0.2) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        child = int(Path("child").read_text())
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(run.task, 60)
        await run.until(lambda: not alive(child) or _is_zombie(child))
    assert "worker did not end in 0.2 s and is killed" in run.said.getvalue()


async def test_a_second_signal_kills_but_not_one_that_comes_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = "trap 'touch asked' TERM\necho > {name}.up\nwhile :; do sleep 0.02; done"
    clock = [0.0]
    monkeypatch.setattr("svc_common.supervisor.group.monotonic", lambda: clock[0])
    async with running([role("worker", StartTier.WORKER, stubborn)]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        worker = run.pid("worker")
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until(Path("asked").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert alive(worker)
        clock[0] += 2
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(run.task, 60)
    assert not alive(worker)


async def test_what_a_role_writes_is_shown_under_its_name() -> None:
    talks = role("worker", StartTier.WORKER, "printf 'one\\nlast'; touch {name}.up; printf ' word'; exec sleep 600")
    whispers = role("redis", StartTier.STORE, "echo secret; touch {name}.up; exec sleep 600", shows_output=False)
    async with running([whispers, talks]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
    assert "worker | one\nworker | last word\n" in run.said.getvalue()
    assert "secret" not in run.said.getvalue()


async def test_output_without_an_end_of_line_is_shown_in_parts() -> None:
    talks = role("worker", StartTier.WORKER, "head -c 3000000 /dev/zero | tr '\\0' x; touch {name}.up; exec sleep 600")
    async with running([talks]) as run:
        await asyncio.wait_for(run.announced.wait(), 60)
        await run.until(lambda: run.said.getvalue().count("x") >= 2 * 2**20)


async def test_a_signal_while_preparing_kills_what_prepares() -> None:
    async def prepare() -> None:
        await prepare_model({"SECONDS_TO_WAIT": "600"}, ("sh", "-c", 'echo $$ > pid; exec sleep "$SECONDS_TO_WAIT"'))

    async with running(ROLES, prepare) as run:
        await run.until(lambda: Path("pid").exists() and Path("pid").read_text() != "")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(run.task, 60)
    assert not alive(int(Path("pid").read_text()))
    assert not Path("redis.up").exists()


async def test_nothing_starts_when_preparing_fails() -> None:
    async with running(ROLES, lambda: prepare_model({}, ("sh", "-c", "exit 3"))) as run:
        with pytest.raises(PrepareFailed, match="exit status 3"):
            await asyncio.wait_for(run.task, 60)
    assert not Path("redis.up").exists()


ORPHAN = """
import asyncio, sys
from svc_common.supervisor.launch import launch_command
async def main():
    process = await asyncio.create_subprocess_exec(*launch_command(["sleep", "600"]))
    print(process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""


async def test_a_role_dies_with_a_supervisor_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[4]
    monkeypatch.chdir(root)
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", ORPHAN, stdout=asyncio.subprocess.PIPE)
    assert supervisor.stdout
    child = int(await supervisor.stdout.readline())
    async with asyncio.timeout(60):
        while Path(f"/proc/{child}/comm").read_text() != "sleep\n":
            await asyncio.sleep(0.01)
        supervisor.kill()
        await supervisor.wait()
        while alive(child) and not _is_zombie(child):
            await asyncio.sleep(0.01)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_waits_double_up_to_a_bound() -> None:
    policy = RestartPolicy(initial_backoff=0.5, max_backoff=10)
    assert [policy.wait(deaths) for deaths in range(1, 9)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_a_role_that_dies_for_hours_is_restarted_still() -> None:
    """Its delay has reached the longest one long ago."""
    policy = RestartPolicy()
    assert [policy.wait(num_exits) for num_exits in (1, 2, 3, 100, 5000)] == [0.0, 0.5, 1.0, 10.0, 10.0]
