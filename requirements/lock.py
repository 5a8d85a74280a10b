"""Resolves pyproject.toml's groups again and writes requirements/*.txt: every package's version, with its hashes.

Versions stay as they are, except those that pyproject.toml now excludes and those that --upgrade names.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parent / "pyproject.toml"
SERVICES = ("gateway", "scheduler", "worker")
OLDEST_PYTHON = "3.11"

HEADER = """\
# {subject}
# Generated from pyproject.toml. After a change there: make requirements. Newer versions: UPGRADE="NAME" beside it.
# Every file that the index has for a version is allowed, for each platform and Python. Install with install.sh.
"""
SUBJECTS = {
    "dev": "What Quire is built and tested with beside torch: `make run`, `make test`.",
    "gateway": "What the gateway's image installs.",
    "scheduler": "What the scheduler's image installs.",
    "worker": "What the worker's image installs beside torch.",
    "torch-cpu": "The CPU builds of torch, which PyPI does not have for Linux.",
    "torch-cuda": "PyPI's torch and, on Linux, the CUDA libraries that it needs.",
    "tools": "The tools that make these files, the bill of materials and the audit; in an environment of their own.",
}

SOURCES = frozenset(
    {
        *("defuser", "device-smi", "gptqmodel", "llama-cpp-python", "logbar", "pybars4", "pymeta3", "pypcre"),
        *("rouge-score", "sqlitedict", "tokenicer", "word2number"),
    }
)
"""Packages that have no wheels. They have a file of their own, since they are built with what the group's file has."""

_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)
_TORCH = re.compile(r"torch==|(nvidia|cuda)-")


def entries(text: str) -> dict[str, str]:
    """A requirements file's entries by name: each the requirement's line and its hashes' lines.

    A package that has other versions for other Pythons has a requirement for each, which are one entry.
    """
    found: dict[str, str] = {}
    for entry in _ENTRY.split(text):
        if re.match(r"\w", entry):
            name = entry.partition("==")[0]
            found[name] = found.get(name, "") + entry
    return found


def version(entry: str) -> str:
    """The version that an entry pins."""
    return entry.partition("==")[2].split()[0]


def read(name: str) -> dict[str, str]:
    """The entries that stand in a file now."""
    path = HERE / f"{name}.txt"
    return entries(path.read_text()) if path.exists() else {}


def subject(name: str) -> str:
    """The first line of a file's header."""
    kind, _, own = name.partition("-")
    match kind:
        case "client" if own.endswith("-sources"):
            return f"What the client {own.removesuffix('-sources')} of `make clients` needs that has no wheels."
        case "client":
            return f"The client {own} of `make clients`; in an environment of its own."
        case "peer":
            return f"What the tests of {own} need that `make peers` runs; in an environment of its own."
        case "bench" if own.endswith("-sources"):
            return f"What benchmarks of {own.removesuffix('-sources')} need that has no wheels."
        case "bench":
            return f"What benchmarks of {own} need beside torch; in an environment of its own."
        case "aot":
            return "The older Triton by which `make aot` compiles too; in a folder of its own."
    return SUBJECTS[name]


def write(name: str, packages: dict[str, str]) -> None:
    """Writes a file."""
    text = HEADER.format(subject=subject(name)) + "".join(packages[package] for package in sorted(packages))
    (HERE / f"{name}.txt").write_text(text)


def compile_group(
    uv: Path, sources: Sequence[str], known: Iterable[str], upgrade: Sequence[str] = ()
) -> dict[str, str]:
    """The entries that uv resolves for the part of pyproject.toml that `sources` names, and for the build backend.

    Versions of `known` entries are kept while they fit.
    """
    build = tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as directory:
        output, backend = Path(directory, "requirements.txt"), Path(directory, "build.in")
        output.write_text("".join(known))
        backend.write_text("\n".join(build) + "\n")
        command: list[str | Path] = [
            *(uv, "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", OLDEST_PYTHON),
            *(
                "--fork-strategy",
                "fewest",
                "--generate-hashes",
                "--no-header",
                "--no-annotate",
                "--output-file",
                output,
            ),
            *(f"--upgrade-package={name}" for name in upgrade),
            *sources,
            backend,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return entries(output.read_text())


def cpu_hashes(torch_version: str, index: str) -> set[str]:
    """Digests of the CPU builds of torch in `index`: a folder of wheels, or a package index such as PyTorch's."""
    build = rf"torch-{re.escape(torch_version)}(?:\+|%2B)cpu-"
    if Path(index).is_dir():
        wheels = (path for path in Path(index).glob("*.whl") if re.match(build, path.name))
        return {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    with urllib.request.urlopen(f"{index.rstrip('/')}/torch/") as page:
        return set(re.findall(rf'{build}[^"]*#sha256=(\w{{64}})', page.read().decode()))


def cpu_torch(torch_version: str, index: str | None) -> dict[str, str]:
    """The entry of torch's CPU builds. Without an index it is the one that stands in the file, if its version fits."""
    if index is None:
        before = read("torch-cpu")
        if not before or version(before["torch"]) != f"{torch_version}+cpu":
            raise SystemExit(f"requirements: CPU_TORCH must name an index with the CPU builds of torch {torch_version}")
        return before
    digests = sorted(cpu_hashes(torch_version, index))
    if not digests:
        raise SystemExit(f"requirements: no CPU build of torch {torch_version} in {index}")
    lines = [f"torch=={torch_version}+cpu", *(f"    --hash=sha256:{digest}" for digest in digests)]
    return {"torch": " \\\n".join(lines) + "\n"}


def write_group(uv: Path, name: str, upgrade: Sequence[str]) -> None:
    """Writes the files of a dependency group. Its torch is that of the services."""
    sources = f"{name}-sources"
    torch = read("torch-cuda")
    known = torch | read(name) | read(sources)
    packages = compile_group(uv, ["--group", f"{PYPROJECT}:{name}"], known.values(), upgrade)
    own = {package: entry for package, entry in packages.items() if package not in torch}
    write(name, {package: entry for package, entry in own.items() if package not in SOURCES})
    if built := {package: own[package] for package in SOURCES & own.keys()}:
        write(sources, built)


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", type=Path, default=Path(sys.executable).with_name("uv"))
    parser.add_argument(
        "--upgrade", nargs="*", default=[], metavar="NAME", help="packages to bring to the newest version"
    )
    parser.add_argument("--cpu-torch", metavar="INDEX", help="folder or index with the CPU builds of torch")
    arguments = parser.parse_args()

    before = read("dev") | read("torch-cuda")
    packages = compile_group(arguments.uv, [str(PYPROJECT), "--extra", "dev"], before.values(), arguments.upgrade)
    write("torch-cpu", cpu_torch(version(packages["torch"]), arguments.cpu_torch))
    write("torch-cuda", {name: entry for name, entry in packages.items() if _TORCH.match(entry)})
    write("dev", {name: entry for name, entry in packages.items() if not _TORCH.match(entry)})
    for service in SERVICES:
        own = compile_group(arguments.uv, [str(PYPROJECT), "--extra", service], packages.values())
        write(service, {name: packages[name] for name, entry in own.items() if not _TORCH.match(entry)})
    for name in tomllib.loads(PYPROJECT.read_text())["dependency-groups"]:
        write_group(arguments.uv, name, arguments.upgrade)


if __name__ == "__main__":
    main()
