"""Services set gRPC's polling before they import it, and gRPC accepts it."""

import os
import subprocess
import sys

import pytest

from svc_common.grpc_polling import EXPERIMENTS, NO_EVENT_ENGINE

# Prints the setting at a program's first import of gRPC, and stops there.
WATCH = f"""
import importlib.abc, os, runpy, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("{EXPERIMENTS}"))
            raise SystemExit

sys.meta_path.insert(0, Watch())
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""

SERVE = """
import svc_common.grpc_polling
svc_common.grpc_polling.disable_event_engine()
import asyncio, grpc

async def serve():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
"""


def run(code: str, *arguments: str, experiments: str | None = None) -> "subprocess.CompletedProcess[str]":
    """A new process, with gRPC's experiments in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != EXPERIMENTS}
    if experiments is not None:
        environment[EXPERIMENTS] = experiments
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("service", ["gateway_svc", "scheduler_svc", "worker_svc", "benchmarks.steps.worker"])
def test_polling_is_set_before_grpc_is_imported(service: str) -> None:
    assert run(WATCH, service).stdout.splitlines() == [NO_EVENT_ENGINE]


def test_who_sets_the_variable_is_obeyed() -> None:
    assert run(WATCH, "scheduler_svc", experiments="").stdout.splitlines() == [""]


def test_grpc_knows_the_experiments() -> None:
    served = run(SERVE)
    assert served.returncode == 0
    assert "Unknown experiment" not in served.stderr
    assert "Unknown experiment: quire" in run(SERVE, experiments="-quire").stderr
