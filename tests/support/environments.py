"""Environments of processes that tests start: the test's own environment without Quire's settings."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bare_environment(*kept: str) -> dict[str, str]:
    """The environment without variables of Quire and of telemetry, except for the named ones."""
    return {
        name: value for name, value in os.environ.items() if name in kept or not name.startswith(("QUIRE_", "OTEL_"))
    }


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
