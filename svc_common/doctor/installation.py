"""Checks of the installation: Python, the packages of each role, the code of the contracts, disk space of caches."""

import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from svc_common.doctor.directories import existing, is_writable
from svc_common.doctor.findings import Check, CheckContext, CheckGroup, Finding, ok, warning, wrong

_GIB = 2**30
_LEAST_FREE = _GIB
"""Free bytes of a cache below which there is a warning. The default model takes 0.6 GiB."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(\[(?P<extras>[\w,-]+)\])?\s*(>=\s*(?P<floor>[\d.]+))?\s*(;\s*extra == \"(?P<extra>\w+)\")?"
)
_CONTRACTS = {
    "gateway": ("inference.v1.inference", "scheduler.v1.scheduler", "open_inference.v2.open_inference"),
    "scheduler": ("scheduler.v1.scheduler", "worker.v1.worker", "admin.v1.admin"),
    "worker": ("worker.v1.worker",),
}
"""The contracts that each role serves or calls."""


def check_python(_: CheckContext) -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    least = _requires_python()
    if sys.version_info < least:
        needed = ".".join(map(str, least))
        yield wrong(found, f"Quire needs Python {needed} or later", f"make the environment with Python {needed}")
    elif sys.platform != "linux":
        yield wrong(found, "the services run on Linux only", "run them in a Linux machine or container")
    else:
        yield ok(found)


def _requires_python() -> tuple[int, ...]:
    try:
        declared = metadata("quire")["Requires-Python"]
    except (PackageNotFoundError, KeyError):
        return (3, 11)
    return _numbers(declared)


def check_packages(context: CheckContext) -> Iterator[Finding]:
    try:
        lines = requires("quire") or []
    except PackageNotFoundError:
        step = "in a clone of Quire: `make install`, or pip install --editable '.[local]'"
        yield warning("the package `quire` is not installed", "its requirements are not known", step)
        return
    for role in context.roles:
        yield _check_packages_of(role, lines)


def _check_packages_of(role: str, lines: list[str]) -> Finding:
    missing, old, count = [], [], 0
    for name, floor in sorted(requirements_of(role, lines).items()):
        count += 1
        try:
            found = version(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        if floor and _numbers(found) < _numbers(floor):
            old.append(f"{name} {found}, older than {floor}")
    step = f"in the clone of Quire: `make install`, or pip install --upgrade --editable '.[{role}]'"
    if missing or old:
        problem = "; ".join([*([f"missing: {', '.join(missing)}"] if missing else []), *old])
        return wrong(f"packages of the {role}", problem, step)
    return ok(f"all {count} of the {role}")


def requirements_of(extra: str, lines: list[str]) -> dict[str, str]:
    """The packages that Quire and an extra require, with the lowest version, if one is named. Requirements with other
    conditions are optional.
    """
    found: dict[str, str] = {}
    pending = ["", extra]
    for wanted in pending:
        for line in lines:
            match = _REQUIREMENT.fullmatch(line.strip())
            if match is None or (match["extra"] or "") != wanted:
                continue
            if match["name"] == "quire":
                pending += [one for one in match["extras"].split(",") if one not in pending]
            else:
                found[match["name"]] = match["floor"] or ""
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def check_contracts(context: CheckContext) -> Iterator[Finding]:
    names = sorted({name for role in context.roles for name in _CONTRACTS[role]})
    for name in names:
        try:
            import_module(f"quire.{name}_pb2")  # checks the version of protobuf
            import_module(f"quire.{name}_pb2_grpc")  # checks the version of grpcio
        except Exception as error:  # each package has its own exception for another version
            floors = " ".join(f"'{name}>={floor}'" for name, floor in _floors().items())
            step = f"pip install --upgrade {floors}" if floors else "install the versions that pyproject.toml names"
            yield wrong(f"quire.{name}: {error}", "the contracts' code does not fit grpcio or protobuf", step)
            return
    yield ok(
        f"the code of {len(names)} contracts works with grpcio {version('grpcio')}, protobuf {version('protobuf')}"
    )


def _floors() -> dict[str, str]:
    try:
        lines = requires("quire") or []
    except PackageNotFoundError:
        return {}
    return {name: floor for name, floor in requirements_of("", lines).items() if floor}


def check_disk(_: CheckContext) -> Iterator[Finding]:
    from svc_common.models import cache_root

    root = cache_root()
    place = existing(root)
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB free for {root} (QUIRE_CACHE_DIR)"
    if not is_writable(root):
        step = f"make {root} writable for this user, or set QUIRE_CACHE_DIR to another directory"
        yield warning(found, "nothing can be written there: models and compiled kernels are not kept", step)
    elif free < _LEAST_FREE:
        step = f"delete what is not needed on the disk of {place}, or set QUIRE_CACHE_DIR to another disk"
        yield warning(found, "a downloaded or converted model may not fit", step)
    else:
        yield ok(found)


GROUP = CheckGroup(
    (
        Check("python", check_python),
        Check("packages", check_packages),
        Check("contracts", check_contracts, 30),
        Check("disk", check_disk),
    )
)
