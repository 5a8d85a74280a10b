"""The Dockerfiles, as far as they can be checked without a build."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
PORTS = {"gateway": {8000, 50051}, "scheduler": {50052, 9101}, "worker": {50053, 9102}}
services = pytest.mark.parametrize("service", PORTS)


def recipe(service: str) -> str:
    return (DOCKER / f"{service}.Dockerfile").read_text()


@services
def test_it_lints(service: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKER / f"{service}.Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@services
def test_it_installs_its_own_group_by_hashes(service: str) -> None:
    assert (ROOT / "requirements" / f"{service}.txt").exists()
    assert f"sh requirements/install.sh /opt/quire/bin/python {service} ." in recipe(service)
    # Nothing else of Python's is installed.
    assert not re.search(r"pip3? install", recipe(service))
    assert "--no-deps --only-binary :all: --require-hashes" in (ROOT / "requirements/install.sh").read_text()


@services
def test_every_stage_is_based_on_the_image_that_a_build_argument_names(service: str) -> None:
    text = recipe(service)
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    assert text.index("ARG PYTHON_IMAGE") < text.index("FROM ")


@services
def test_it_copies_what_is_there_and_sent_to_the_builder(service: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", recipe(service), re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert {"pyproject.toml", "requirements", f"{service}_svc", "svc_common", "protos"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_the_worker_has_a_compiler_for_its_kernels() -> None:
    stages = re.split(r"^FROM ", recipe("worker"), flags=re.MULTILINE)
    assert re.search(r"apt-get install .*\bg\+\+ .*\blibc6-dev\b", stages[-1])


@services
def test_it_runs_its_service_as_nobody_on_its_ports(service: str) -> None:
    text = recipe(service)
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert f'ENTRYPOINT ["python", "-m", "{service}_svc"]' in text
    (ports,) = re.findall(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert {int(port) for port in ports.split()} == PORTS[service]
