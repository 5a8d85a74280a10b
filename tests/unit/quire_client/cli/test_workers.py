"""`quire reset-prefix-cache` and `quire profile` with a real server and scripted responses."""

import asyncio
import json

import pytest
from typer.testing import CliRunner, Result

from quire.admin.v1 import admin_pb2 as pb
from quire_client.cli.app import app, run
from scripted_admin import ScriptedAdmin

FREED = pb.WorkerCacheReset(
    worker="10.0.0.1:50053", model="tiny", num_freed_device_blocks=1_200, num_freed_host_blocks=7,
    num_kept_device_blocks=3, num_kept_host_blocks=1,
)  # fmt: skip
TRACE = pb.WorkerProfile(worker="10.0.0.1:50053", model="tiny", path="/traces/1.pt.trace.json.gz")
REFUSAL = pb.WorkerProfile(worker="10.0.0.2:50053", model="tiny", problem="QUIRE_PROFILE_DIR is not set")


async def invoke(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(args))


async def test_freed_blocks_are_listed_by_worker(admin: ScriptedAdmin) -> None:
    admin.resets = [FREED]
    result = await invoke("reset-prefix-cache", "--model", "tiny")
    assert result.exit_code == 0, result.output
    heading, row = result.output.splitlines()
    assert heading.split("  ")[0].strip() == "model"
    assert row.split() == ["tiny", "10.0.0.1:50053", "1,200", "7", "4"]
    assert admin.requests == [pb.ResetPrefixCacheRequest(model="tiny")]


async def test_the_answers_are_json_if_asked(admin: ScriptedAdmin) -> None:
    admin.resets, admin.profiles = [FREED], [TRACE]
    reset = await invoke("reset-prefix-cache", "-o", "json")
    stopped = await invoke("profile", "stop", "-o", "json")
    assert json.loads(reset.output)[0]["num_freed_device_blocks"] == 1_200
    assert json.loads(stopped.output)[0]["path"] == TRACE.path
    assert admin.requests == [pb.ResetPrefixCacheRequest(), pb.StopProfileRequest()]


async def test_a_worker_that_refuses_a_profile_is_a_failure(
    admin: ScriptedAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.profiles = [pb.WorkerProfile(worker="10.0.0.1:50053", model="tiny")]
    assert await asyncio.to_thread(run, ["profile", "start"]) == 0
    assert "started" in capsys.readouterr().out
    admin.profiles = [TRACE, REFUSAL]
    assert await asyncio.to_thread(run, ["profile", "stop"]) == 1
    output = capsys.readouterr().out
    assert TRACE.path in output
    assert REFUSAL.problem in output
