"""Results' files: provenance, writing and reading. Imports only the standard library."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIRTY = "-dirty"
"""What ends the name of a commit from which files differ."""

_WRITTEN = ("benchmarks/results/", "docs/")
_NO_CODE = (*_WRITTEN, "tests/", "ARCHITECTURE.md", "CHANGELOG.md", "README.md", "SECURITY.md")


def provenance(*packages: str) -> dict[str, Any]:
    """The head of a result: date, commit, and the machine with the versions of `packages` that it has."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": code_hash(),
        "machine": describe_machine(*packages),
    }


def commit() -> str | None:
    """The commit that is measured, marked where files differ from it or are not in it; None outside a repository.

    Results and pages are written one after the other by the measurements themselves, and mark nothing.
    """
    try:
        head = _git("rev-parse", "HEAD").strip()
        changed = _git(
            "status", "--porcelain", "--untracked-files=normal", "--", ".", *(f":!{path}" for path in _WRITTEN)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}{DIRTY}" if changed else head


def code_hash() -> str | None:
    """A hash of the committed files that figures depend on; None where files differ from it, or outside a repository.

    Results, pages and tests are no part of it, so that it stays the same while results are committed one by one.
    """
    head = commit()
    if head is None or head.endswith(DIRTY):
        return None
    files = [
        line for line in _git("ls-tree", "-r", "HEAD").splitlines() if not line.partition("\t")[2].startswith(_NO_CODE)
    ]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def describe_machine(*packages: str) -> dict[str, Any]:
    """The parts of a machine that figures depend on; nothing that identifies the machine."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{name: version for name in packages if (version := _version(name)) is not None},
    }


def describe_gpu() -> dict[str, Any] | None:
    """The GPU that torch computes on; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Replaces the file atomically, so that a killed program leaves a valid one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(path)


def read_result(path: Path) -> dict[str, Any] | None:
    """The result in a file; None where there is none."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_bytes())
    return result


def _git(*args: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
