"""Environments of processes that tests start: the test's own environment without Quire's settings."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bare_environment(*kept: str) -> dict[str, str]:
    """The environment without variables of Quire and of telemetry, except for the named ones."""
    return {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(("QUIRE_", "OTEL_"))
    }


def shared_processors() -> int:
    """Processors for each test process: those of the machine, shared by all that run tests."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def worker_threads() -> dict[str, str]:
    """The setting of a worker's threads. More of them than processors wait for each other at every parallel loop."""
    return {"QUIRE_NUM_THREADS": str(shared_processors())}


def service_environment() -> dict[str, str]:
    """The environment of a service that runs from the source tree, among parts of the test that prove no role."""
    return bare_environment() | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
        "QUIRE_INSECURE": "1",
    }


def scheduler_environment(redis_url: str, workers_at: str) -> dict[str, str]:
    """The environment of a scheduler on free ports."""
    return service_environment() | {
        "QUIRE_SCHEDULER_PORT": "0",
        "QUIRE_SCHEDULER_ADMIN_PORT": "0",
        "QUIRE_SCHEDULER_METRICS_PORT": "0",
        "QUIRE_REDIS_URL": redis_url,
        "QUIRE_WORKERS_AT": workers_at,
    }
