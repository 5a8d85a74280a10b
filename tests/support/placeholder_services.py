"""Programs in place of the services, for tests of what starts them, and whether processes are gone."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from environments import ROOT, bare_environment

PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")

GRPC_SERVICE = """
import asyncio, os
from svc_common.server import HealthReporter, bind, create_server, run_until_signal

async def main():
    server = create_server(max_message_bytes=1024)
    health = HealthReporter(server, [])
    bind(server, os.environ["QUIRE_HOST"], int(os.environ["QUIRE_{role}_PORT"]))
    await server.start()
    await health.set_serving(True)
    await run_until_signal(lambda: server.stop(None))

asyncio.run(main())
"""

GATEWAY = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

print("hello from the gateway", flush=True)
HTTPServer((os.environ["QUIRE_HOST"], int(os.environ["QUIRE_HTTP_PORT"])), Handler).serve_forever()
"""

SETTINGS = """
from svc_common.settings import ServiceSettings

class {name}Settings(ServiceSettings):
    pass
"""

SERVICES = {
    "worker_svc": GRPC_SERVICE.replace("{role}", "WORKER"),
    "scheduler_svc": GRPC_SERVICE.replace("{role}", "SCHEDULER"),
    "gateway_svc": GATEWAY,
}


def write_services(directory: Path) -> None:
    """Writes packages for `python -m worker_svc` and the other services."""
    for name, code in SERVICES.items():
        (directory / name).mkdir()
        (directory / name / "__init__.py").touch()
        (directory / name / "__main__.py").write_text(code)
        of_service = name.removesuffix("_svc").capitalize()
        (directory / name / "settings.py").write_text(SETTINGS.replace("{name}", of_service))
    (directory / "worker_svc" / "prepare.py").write_text("import sys; print('converting', file=sys.stderr)")


def placeholder_environment(directory: Path) -> dict[str, str]:
    """The environment of a supervisor of these programs, which is started in their directory, on free ports."""
    ports = {f"QUIRE_{port}_PORT": "0" for port in PORTS}
    return bare_environment() | ports | {"QUIRE_STATE_FILE": str(directory / "state.json"), "PYTHONPATH": str(ROOT)}


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until_gone(pids: Iterable[int]) -> None:
    """Waits until processes have ended, at most a minute."""
    pids = list(pids)
    async with asyncio.timeout(60):
        while any(map(alive, pids)):
            await asyncio.sleep(0.01)
