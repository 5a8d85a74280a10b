"""The wheel `quire-client`: the client and its contracts, and no server, with the packages that it says it requires."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]

# What runs with nothing but the wheel and its requirements.
PROGRAM = """
import importlib, sys
sys.path[:0] = sys.argv[1:]
from quire_client import Client, AsyncClient, QuireError, __version__
from quire_client.admin import AdminClient
assert __version__ == "0.1.0", __version__
with Client("127.0.0.1:1", timeout=0.01) as client, AdminClient("127.0.0.1:1", timeout=0.01) as admin:
    try:
        client.generate("x")
    except QuireError as error:
        print(error.reason)
for server in ("gateway_svc", "scheduler_svc", "worker_svc", "svc_common", "quire.scheduler", "quire.worker"):
    try:
        importlib.import_module(server)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{server} is in the wheel")
"""
COMMAND = """
import sys
sys.path[:0], sys.argv = sys.argv[1:], ["quire", "--help"]
from quire_client.cli import main
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built of copies, since a build leaves files beside its sources."""
    here = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for folder in ("client", "protos"):
        shutil.copytree(ROOT / folder, here / folder, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(here), str(here / "client")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = here.glob("*.whl")
    assert built.name == "quire_client-0.1.0-py3-none-any.whl"
    unpacked = here / "unpacked"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(unpacked)
    return unpacked


def requirements_of(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    fields = HeaderParser().parsestr(metadata.read_text())
    return needed(fields.get_all("Requires-Dist") or [], extras)


def needed(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """The requirements that apply here, with these extras."""
    requirements = [Requirement(line) for line in lines]
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [one for one in requirements if one.marker is None or any(map(one.marker.evaluate, environments))]


def install(wheel: Path, target: Path, extras: Iterable[str] = ()) -> None:
    """Links what the wheel requires, and what that requires, from this environment into a directory."""
    pending, seen = requirements_of(wheel, extras), set[str]()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        assert requirement.specifier.contains(found.version), requirement
        link_files(found.files or [], Path(str(found.locate_file(""))), target)
        pending += needed(found.requires or [], requirement.extras)


def link_files(files: Iterable[PurePath], site: Path, target: Path) -> None:
    for file in files:
        source, link = site / file, target / file
        if ".." not in file.parts and source.is_file() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)


def run(program: str, *path: Path) -> str:
    """Runs a program without the packages of this environment."""
    command = [sys.executable, "-I", "-S", "-c", program, *map(str, path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_needs_only_what_its_wheel_requires(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path)
    assert run(PROGRAM, wheel, tmp_path).strip() in ("UNREACHABLE", "DEADLINE_EXCEEDED")


def test_the_command_line_needs_only_the_extra(wheel: Path, tmp_path: Path) -> None:
    install(wheel, tmp_path, ["cli"])
    assert "Use and measure a Quire server." in run(COMMAND, wheel, tmp_path)


def test_the_wheel_has_the_version_and_the_floors_of_quire() -> None:
    whole, client = (tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in (".", "client"))
    assert client["version"] == whole["version"]
    assert client["requires-python"] == whole["requires-python"]
    assert set(client["dependencies"]) <= set(whole["dependencies"])
    assert set(client["optional-dependencies"]["cli"]) == set(whole["optional-dependencies"]["client"])
