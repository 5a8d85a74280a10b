"""requirements/*.txt: every package that pyproject.toml's groups need, each version pinned and hashed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11", "3.12")
MACHINES = ("x86_64", "aarch64")
files = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
groups = pytest.mark.parametrize("group", ["dev", "gateway", "scheduler", "worker"])


def pins(name: str) -> dict[str, Requirement]:
    text = (FOLDER / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line.split(" --hash")[0] for line in text.splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def with_torch(group: str) -> dict[str, Requirement]:
    return pins(group) | (pins("torch-cuda") if group in ("dev", "worker") else {})


def requirements(group: str) -> Iterator[Requirement]:
    """What pyproject.toml says that a group needs, with the groups that it names."""
    project = PROJECT["project"]
    for text in [
        *project["dependencies"],
        *project["optional-dependencies"][group],
        *PROJECT["build-system"]["requires"],
    ]:
        requirement = Requirement(text)
        if requirement.name != "quire":
            yield requirement
        for extra in requirement.extras if requirement.name == "quire" else ():
            yield from requirements(extra)


def applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment)


@files
def test_every_package_is_pinned_and_hashed_and_no_index_is_named(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert "://" not in text
    packages = [
        entry for entry in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if entry and not entry.startswith("#")
    ]
    assert packages
    for package in packages:
        assert re.match(r"[\w.-]+==[\w.+]+ ([^\n]*)\\\n", package), package
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", package), package


@groups
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", MACHINES)
def test_what_pyproject_needs_is_there_in_a_version_that_fits(group: str, python: str, machine: str) -> None:
    pinned = with_torch(group)
    environment = {"python_version": python, "python_full_version": f"{python}.4", "platform_machine": machine}
    missing = []
    for requirement in requirements(group):
        pin = pinned.get(canonicalize_name(requirement.name))
        if not applies(requirement, environment):
            continue
        fits = (
            pin is not None and applies(pin, environment) and next(iter(pin.specifier)).version in requirement.specifier
        )
        if not fits:
            missing.append(str(requirement))
    assert missing == [], "run `make requirements`"


@groups
def test_what_its_packages_need_is_there_too(group: str) -> None:
    """As far as they are installed here."""
    pinned = with_torch(group)
    needed = {
        canonicalize_name(requirement.name)
        for name, pin in pinned.items()
        if applies(pin, {}) and any(importlib.metadata.distributions(name=name))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ())
        if applies(requirement, {"extra": ""})
    }
    assert needed <= pinned.keys(), "run `make requirements`"


@pytest.mark.parametrize("group", [name for name in PROJECT["dependency-groups"] if name.startswith("client-")])
def test_environments_of_clients_have_what_their_groups_need(group: str) -> None:
    needed = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependency-groups"][group]}
    assert needed <= pins(group).keys(), "run `make requirements`"


@pytest.mark.parametrize("name", ["gateway", "scheduler", "worker"])
def test_images_have_the_versions_that_are_tested(name: str) -> None:
    tested = (FOLDER / "dev.txt").read_text()
    own = (FOLDER / f"{name}.txt").read_text()
    for entry in re.split(r"^(?=\w)", own, flags=re.MULTILINE)[1:]:
        assert entry in tested


def test_gateways_and_schedulers_install_no_torch() -> None:
    assert not {"torch", "triton"} & (pins("gateway").keys() | pins("scheduler").keys())


def test_the_builds_of_torch_have_one_version_and_cpu_builds_bring_no_cuda_libraries() -> None:
    (cpu,), (cuda,) = pins("torch-cpu")["torch"].specifier, pins("torch-cuda")["torch"].specifier
    assert cpu.version == f"{cuda.version}+cpu"
    assert pins("torch-cpu").keys() == {"torch"}
    assert any(name.startswith("nvidia-") for name in pins("torch-cuda"))
    assert not pins("torch-cuda").keys() & (pins("dev").keys() | pins("worker").keys())


def test_packages_agree_with_each_other() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "gateway.txt").read_text()
    (entry,) = (entry for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE) if entry.startswith("starlette=="))
    (tmp_path / "one.txt").write_text(entry)
    shutil.copy(FOLDER / "install.sh", tmp_path)
    version = entry.split()[0].partition("==")[2]
    (tmp_path / f"starlette-{version}-py3-none-any.whl").write_bytes(b"another file")
    done = subprocess.run(
        ["sh", tmp_path / "install.sh", sys.executable, "one", "."],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "out").exists()
