"""`make run` as a user calls it: settings are passed on, one line reports that it is ready, SIGTERM ends it cleanly."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from ports import lasting_port

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not (ROOT / ".venv/.installed").exists() or Path(sys.prefix) != ROOT / ".venv", reason="runs under make test alone"
)
def test_make_run_starts_and_ends(model: object, tmp_path: Path) -> None:
    port, log = lasting_port(), tmp_path / "log"
    settings = [f"QUIRE_{name}_PORT=0" for name in ("GRPC", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER_METRICS")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    with log.open("wb") as output:
        make = subprocess.Popen(
            ["make", "run", f"QUIRE_HTTP_PORT={port}", f"QUIRE_RUN_DIR={tmp_path}", *settings],
            cwd=ROOT,
            env=environment | {name: os.environ[name] for name in ("QUIRE_CACHE_DIR",) if name in os.environ},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    end = time.monotonic() + 240
    while b"quire is ready" not in log.read_bytes():
        assert make.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert answer.status == 200
    os.killpg(make.pid, signal.SIGTERM)
    make.wait(60)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
