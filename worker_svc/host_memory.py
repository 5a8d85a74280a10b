"""The memory of this process's container, or of the machine if it has none: the limit, and what is used of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# cgroup v1 writes "no limit" as a number near 2^63.
_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes that are used, of at most `limit`. Page cache that the kernel can drop does not count as used: pages of
    files that no process has mapped, such as a model's that has been read.
    """

    used: int
    limit: int
    source: str
    """What sets the limit, for the operator."""

    @property
    def available(self) -> int:
        """Bytes that can be allocated before the limit."""
        return max(0, self.limit - self.used)

    @property
    def share(self) -> float:
        """Of the limit that is used; above 1 beyond it."""
        return self.used / self.limit


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of one version of cgroups, and the entries of `memory.stat`."""

    name: str
    limit: str
    usage: str
    inactive: str
    active: str
    mapped: str
    shared: str
    """Which may be mapped, and is in no file."""


_V2 = _Version("cgroup v2", "memory.max", "memory.current", "inactive_file", "active_file", "file_mapped", "shmem")
_V1 = _Version(
    "cgroup v1",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
    "total_shmem",
)


class HostMemoryReader:
    """Reads the memory again and again. Any thread may use it."""

    def __init__(self, limit: int | None = None, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        """With `limit` in bytes, the limit is that one, and what is used is what this process uses."""
        self._limit, self._proc = limit, proc
        self._groups = list(_groups(cgroups, proc))

    def read(self) -> HostMemory:
        """The memory with the limit that is nearest: the setting's, else the container's, else the machine's."""
        if self._limit is not None:
            return HostMemory(self.read_process(), self._limit, "QUIRE_MEMORY_LIMIT")
        return max(self.read_containers(), key=lambda memory: memory.share, default=None) or self.read_machine()

    def read_containers(self) -> list[HostMemory]:
        """The cgroups of this process that have a limit: its own one, and those around it."""
        return [memory for group, version in self._groups if (memory := _read_group(group, version)) is not None]

    def read_machine(self) -> HostMemory:
        """The whole machine."""
        sizes = _sizes(self._proc / "meminfo")
        return HostMemory(sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"], "the machine")

    def read_process(self) -> int:
        """Bytes of memory of this process that are in no file."""
        sizes = _sizes(self._proc / "self" / "status")
        return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)

    def room(self, share: float) -> int:
        """Bytes that can be allocated until this share of the limit is used."""
        memory = self.read()
        return max(0, min(int(share * memory.limit) - memory.used, self.available()))

    def available(self) -> int:
        """Bytes that can be allocated without swapping or being killed."""
        containers = [memory.available for memory in self.read_containers()]
        own = [max(0, self._limit - self.read_process())] if self._limit is not None else []
        return min(self.read_machine().available, *containers, *own, 2**63)


def available_memory(limit: int | None = None) -> int:
    """Bytes of memory that the process can allocate without swapping or being killed, `limit` included."""
    return HostMemoryReader(limit).available()


def _groups(cgroups: Path, proc: Path) -> Iterator[tuple[Path, _Version]]:
    """The directories of this process's memory cgroups, from its own one up to the root of what is mounted.

    In a container the root often is the container's own cgroup, whatever path the process has outside.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {_V1: "/", _V2: "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for version, root in ((_V2, cgroups), (_V1, cgroups / "memory")):
        group = root / paths[version].lstrip("/")
        for directory in (group, *group.parents):
            if (directory / version.limit).exists():
                yield directory, version
            if directory == root:
                break


def _read_group(group: Path, version: _Version) -> HostMemory | None:
    """None: it has no limit, or it is gone."""
    limit = _number(group / version.limit)
    used = _number(group / version.usage)
    if limit is None or used is None or not 0 < limit < _UNLIMITED:
        return None
    return HostMemory(max(0, used - _droppable(group / "memory.stat", version)), limit, version.name)


def _droppable(stat: Path, version: _Version) -> int:
    """Bytes of page cache that the kernel drops before it kills a process.

    Kubernetes counts only what is inactive. But a file that was read twice, as weights are that are hashed and loaded,
    is active, and is dropped as readily if nobody has it mapped.
    """
    try:
        words = (line.split() for line in stat.read_text().splitlines())
        entries = {key: int(value) for key, value in words}
    except (OSError, ValueError):
        return 0
    inactive, active = entries.get(version.inactive, 0), entries.get(version.active, 0)
    mapped = max(0, entries.get(version.mapped, 0) - entries.get(version.shared, 0))
    return max(inactive, inactive + active - mapped)


def _sizes(path: Path) -> dict[str, int]:
    """The bytes of all `Name:  number kB` of a file."""
    words = (line.split() for line in path.read_text().splitlines())
    return {entry[0].rstrip(":"): int(entry[1]) * 1024 for entry in words if entry[2:] == ["kB"]}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
