"""Checks of packages and directories."""

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

from svc_common.doctor import installation
from svc_common.doctor.directories import is_writable
from svc_common.doctor.findings import CheckContext, Status
from svc_common.doctor.installation import check_contracts, check_disk, check_packages, check_python, requirements_of
from svc_common.doctor.redis_versions import is_too_old


def test_the_requirements_of_a_role_are_those_of_the_package() -> None:
    lines = requires("quire") or []
    gateway = requirements_of("gateway", lines)
    assert gateway["grpcio"]
    assert gateway["protobuf"]
    assert {"starlette", "pyjwt", "uvloop"} <= gateway.keys()
    assert not {"torch", "redis", "quire"} & gateway.keys()
    assert {"torch", "safetensors"} <= requirements_of("worker", lines).keys()


def test_here_everything_is_installed() -> None:
    context = CheckContext(roles=("gateway", "scheduler", "worker"))
    findings = [*check_python(context), *check_packages(context), *check_contracts(context)]
    assert {finding.status for finding in findings} == {Status.OK}


def test_missing_and_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name == "starlette":
            raise PackageNotFoundError(name)
        return "1.0.0" if name == "grpcio" else version(name)

    monkeypatch.setattr(installation, "version", found)
    (finding,) = check_packages(CheckContext(roles=("gateway",)))
    assert finding.status is Status.WRONG
    assert finding.problem.startswith("missing: starlette; grpcio 1.0.0, older than ")
    assert "'.[gateway]'" in finding.next_step


def test_a_cache_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (finding,) = check_disk(CheckContext())
    assert (finding.status, "QUIRE_CACHE_DIR" in finding.next_step) == (Status.WARNING, True)
    assert is_writable(tmp_path / "new" / "newer")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("text", "expected"), [("5.0.14", True), ("6.0.9", True), ("6.2.0", False), ("7.4", False)])
def test_versions_of_redis(text: str, expected: bool) -> None:
    assert is_too_old(text) is expected
