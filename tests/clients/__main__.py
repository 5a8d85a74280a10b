"""Runs programs that use Quire through unmodified clients of other projects (`make clients`).

    python -m tests.clients [--clients openai,langchain] [--url http://127.0.0.1:8000 --grpc 127.0.0.1:50051]

Each client has an environment of its own in build/clients, with pinned packages. It is made on first use, which needs
the package index. Without --url, the programs use a deployment with the default model. A client that needs a program
which is not installed here is skipped; in CI it fails. vLLM's client runs where VLLM_VENV names its environment.
Without --url, each run is written to benchmarks/results/clients.json, and into the table of docs/clients.md. The last
line is JSON. Exits with 1 if a check failed.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import provenance
from deployment import deployment
from docs.tools.clients import write_page
from environments import bare_environment
from svc_common.models import find_source
from tests.clients.record import ClientRun, Outcome, write_run
from tests.clients.table import CLIENTS, Client, VllmClient

PROGRAM_SECONDS = 1800  # ten times what the slowest takes


@dataclass(frozen=True)
class Server:
    """Where a gateway is: the base URL of its HTTP API, and host:port of gRPC."""

    http: str
    grpc: str = "127.0.0.1:50051"


def run_program(command: Sequence[str | Path], server: Server, version: str) -> ClientRun:
    """Runs the checks of a client in this version against a server, and prints their results."""
    environment = bare_environment() | {
        "OPENAI_BASE_URL": f"{server.http}/v1",
        "OPENAI_API_KEY": "none",
        "QUIRE_GRPC": server.grpc,
        "QUIRE_MODEL_FILES": str(find_source(None).directory()),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        return ClientRun(version, Outcome.FAILED, reason=f"runs for more than {PROGRAM_SECONDS} s")
    lines = done.stdout.splitlines()
    checks = [json.loads(line) for line in lines if line.startswith('{"check":')]
    for check in checks:
        print(f"  {check['check']}: {'passed' if check['passed'] else check['error']}", flush=True)
    failed = tuple(check["check"] for check in checks if not check["passed"])
    ended = [json.loads(line)["checks"] for line in lines if line.startswith('{"checks":')]
    if checks and ended == [len(checks)] and not failed and done.returncode == 0:
        return ClientRun(version, Outcome.PASSED, len(checks))
    why = f"exit status {done.returncode}" if done.returncode else f"ended after {len(checks)} checks"
    return ClientRun(version, Outcome.FAILED, len(checks), failed, None if failed else why)


def run_client(client: Client, server: Server) -> ClientRun:
    """Makes the client's environment and runs its checks."""
    print(f"{client.name} {client.version}", flush=True)
    if tool := client.missing_tool():
        outcome = Outcome.FAILED if os.environ.get("CI") == "true" else Outcome.SKIPPED
        return ClientRun(client.version, outcome, reason=f"there is no {tool} on the PATH")
    if isinstance(client, VllmClient) and (variable := client.missing_environment()):
        return ClientRun(client.version, Outcome.SKIPPED, reason=f"{variable} names no environment")
    try:
        command = client.command()
    except subprocess.CalledProcessError as error:
        return ClientRun(client.version, Outcome.FAILED, reason=f"environment: exit status {error.returncode}")
    return run_program(command, server, client.version)


@contextmanager
def deployed() -> Iterator[Server]:
    """Starts Quire with the default model, in float32, so that its figures are those of transformers."""
    with deployment(dtype="float32") as started:
        yield Server(started.http, started.grpc)


def main() -> None:
    """Parses the flags, runs the programs, and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(client.name for client in CLIENTS), help="default: %(default)s")
    parser.add_argument("--url", help="base URL of a gateway that runs already")
    parser.add_argument("--grpc", default=Server.grpc, help="its host:port for gRPC; default: %(default)s")
    options = parser.parse_args()
    by_name = {client.name: client for client in CLIENTS}
    names = options.clients.split(",")
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"argument --clients: no client named {unknown[0]!r}")
    code = provenance()
    del code["machine"]  # nothing here depends on it
    runs: dict[str, ClientRun] = {}
    with nullcontext(Server(options.url, options.grpc)) if options.url else deployed() as server:
        for name in names:
            runs[name] = run_client(by_name[name], server)
            if not options.url:  # whose code may be any
                write_run(name, runs[name], code)
                write_page()
    print(json.dumps({name: run.to_json() for name, run in runs.items()}))
    sys.exit(1 if any(run.outcome is Outcome.FAILED for run in runs.values()) else 0)


if __name__ == "__main__":
    main()
