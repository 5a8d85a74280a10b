"""Invalid settings stop the start with an error that names them, in each service and in the supervisor."""

import subprocess
import sys
from pathlib import Path

import pytest

from environments import bare_environment
from svc_common.identity import make_secret
from svc_common.settings import BAD_SETTINGS

PORTS = ("HTTP", "GRPC", "SCHEDULER", "SCHEDULER_ADMIN", "SCHEDULER_METRICS", "WORKER", "WORKER_METRICS")


def start(program: str, directory: Path, **settings: str) -> tuple[int, str]:
    """The exit code and the output of a program that does not start."""
    environment = bare_environment("QUIRE_CACHE_DIR")
    environment |= {f"QUIRE_{port}_PORT": "0" for port in PORTS}
    environment |= {"QUIRE_RUN_DIR": str(directory / "run"), "QUIRE_INSECURE": "1"}
    call = [sys.executable, "-m", program]
    ended = subprocess.run(call, env=environment | settings, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


WRONG_VALUES = {
    "worker_svc": {
        "QUIRE_NUM_BLOCKS": "0",
        "QUIRE_SWAP_SPACE": "-1",
        "QUIRE_SWAP_RATE": "0",
        "QUIRE_BLOCK_SIZE": "0",
        "QUIRE_MAX_MODEL_LEN": "0",
    },
    "scheduler_svc": {
        "QUIRE_POLICY": "lottery",
        "QUIRE_PREEMPTION": "never",
        "QUIRE_AGEING_SECONDS": "0",
        "QUIRE_MAX_QUEUED_REQUESTS": "0",
        "QUIRE_MAX_TENANT_QUEUED_TOKENS": "0",
        "QUIRE_WORKERS_AT": "127.0.0.1:99999",
        "QUIRE_HOST": "a..b",
        "QUIRE_SCHEDULER_ADMIN_HOST": "a..b",
    },
}


@pytest.mark.parametrize(
    ("program", "values"),
    [*WRONG_VALUES.items(), ("worker_svc", {"QUIRE_SWAP_SPACE": "nan"})],
    ids=["worker", "scheduler", "nan"],
)
def test_values_out_of_range_are_all_named(tmp_path: Path, program: str, values: dict[str, str]) -> None:
    code, said = start(program, tmp_path, **values)
    assert code == 2
    for name in values:
        assert name in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        ("worker_svc", {"QUIRE_HOST": "0.0.0.0"}, "will not listen on 0.0.0.0"),
        ("scheduler_svc", {"QUIRE_HOST": "::"}, "will not listen on ::"),
        ("scheduler_svc", {"QUIRE_SCHEDULER_ADMIN_HOST": "0.0.0.0"}, "will not listen on 0.0.0.0"),
        ("scheduler_svc", {"QUIRE_WORKERS_AT": "worker:50053"}, "QUIRE_WORKERS_AT names worker:50053"),
        ("scheduler_svc", {"QUIRE_DEPLOYMENT_SECRET_FILE": ""}, "QUIRE_DEPLOYMENT_SECRET_FILE is not set"),
        ("worker_svc", {"QUIRE_DEPLOYMENT_SECRET_FILE": "/no/file"}, "QUIRE_DEPLOYMENT_SECRET_FILE: /no/file: no such"),
        ("svc_common.supervisor", {"QUIRE_DEPLOYMENT_SECRET_FILE": "/no/file"}, "/no/file: no such file"),
    ],
)
def test_service_without_credentials_does_not_start(
    tmp_path: Path, program: str, settings: dict[str, str], message: str
) -> None:
    make_secret(tmp_path / "secret")
    secure = {"QUIRE_INSECURE": "0", "QUIRE_DEPLOYMENT_SECRET_FILE": str(tmp_path / "secret")}
    code, said = start(program, tmp_path, **secure | settings)
    assert code == (1 if program == "svc_common.supervisor" else BAD_SETTINGS)
    assert message in said
    assert "Traceback" not in said


def test_more_swap_space_than_there_is_memory_is_named(model: object, tmp_path: Path) -> None:
    code, said = start("worker_svc", tmp_path, QUIRE_NUM_BLOCKS="8", QUIRE_SWAP_SPACE="1000000")
    assert code == BAD_SETTINGS
    assert "cannot start: QUIRE_SWAP_SPACE is 1e+06 GiB" in said
    assert "Traceback" not in said


def test_whole_deployment_does_not_start(model: object, tmp_path: Path) -> None:
    code, said = start("svc_common.supervisor", tmp_path, QUIRE_NUM_BLOCKS="0")
    assert code != 0
    assert "QUIRE_NUM_BLOCKS" in said
    assert "quire is ready" not in said
