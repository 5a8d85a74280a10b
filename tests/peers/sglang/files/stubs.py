"""A pytest plugin for SGLang's tests, without SGLang: the servers that they launch are Quire's.

The tests name models that are not here. The default model answers under those names.
"""

import socket
import subprocess
import unittest
from collections.abc import Sequence
from typing import Any

from tests.peers.support import empty_modules
from tests.peers.support.quire_serve import QuireServe

EMPTY = (
    *("sglang.bench_serving", "sglang.benchmark", "sglang.profiler", "sglang.srt"),
    *("sglang.test.run_eval", "sglang.test.test_utils"),
    *("PIL", "aiohttp", "datasets", "numpy", "pybase64", "tabulate", "yaml"),
)

_running: dict[int, QuireServe] = {}
"""By the id of the process that SGLang's tests know."""


def _free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def popen_launch_server(
    model: str, base_url: str, timeout: float, *, other_args: Sequence[str] = (), **_: Any
) -> subprocess.Popen[bytes]:
    """Takes the place of SGLang's function: starts a server of this model at this URL."""
    port = base_url.rpartition(":")[2]
    server = QuireServe(["--served-model-name", model, "--port", port, *other_args])
    _running[server.process.pid] = server
    return server.process


def kill_process_tree(pid: int, *_: Any, **__: Any) -> None:
    """Takes the place of SGLang's function: stops a server."""
    _running.pop(pid).stop()


empty_modules.provide(
    EMPTY,
    {
        "CustomTestCase": unittest.TestCase,
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 600,
        "DEFAULT_URL_FOR_TEST": _free_url(),
        "kill_process_tree": kill_process_tree,
        "popen_launch_server": popen_launch_server,
    },
)
