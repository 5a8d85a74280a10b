"""What is used of which limit, from recorded files: cgroup v2, v1, and no cgroup."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from worker_svc.host_memory import HostMemory, HostMemoryReader

GIB = 2**30
MIB = 2**20

# As Linux 6.1 writes them, in a pod of Kubernetes with a cgroup namespace: the root is the container's own cgroup.
V2_POD = {
    "memory.max": f"{4 * GIB}\n",
    "memory.current": f"{3 * GIB}\n",
    "memory.stat": f"anon {2 * GIB}\nfile {GIB}\nkernel 31252480\nshmem 0\nfile_mapped {256 * MIB}\n"
    f"active_file {256 * MIB}\ninactive_file {512 * MIB}\n",
}
V2_POD_SELF = "0::/\n"
# A service of systemd on a machine without a namespace: the limit is that of a slice above.
V2_SLICE = {
    "user.slice/memory.max": f"{8 * GIB}\n",
    "user.slice/memory.current": f"{7 * GIB}\n",
    "user.slice/memory.stat": f"anon {6 * GIB}\ninactive_file 0\n",
    "user.slice/quire.service/memory.max": "max\n",
    "user.slice/quire.service/memory.current": f"{2 * GIB}\n",
    "user.slice/quire.service/memory.stat": "inactive_file 0\n",
}
V2_SLICE_SELF = "0::/user.slice/quire.service\n"
# Docker on a machine with cgroup v1: the container sees its own cgroup as the root, but its path from outside.
V1_DOCKER = {
    "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    "memory/memory.usage_in_bytes": f"{2 * GIB - MIB}\n",
    "memory/memory.stat": f"cache {GIB}\nrss {GIB}\ninactive_file 4096\ntotal_inactive_file {512 * MIB}\n",
}
# The same after a model's files were read twice, beside 40 MiB of libraries that are mapped, and 30 of shared memory.
V1_CACHED = {
    "memory/memory.limit_in_bytes": f"{GIB}\n",
    "memory/memory.usage_in_bytes": f"{GIB}\n",
    "memory/memory.stat": f"total_shmem {30 * MIB}\ntotal_mapped_file {70 * MIB}\n"
    f"total_inactive_file {64 * MIB}\ntotal_active_file {300 * MIB}\n",
}
V1_DOCKER_SELF = "9:name=systemd:/docker/0123abcd\n8:pids:/docker/0123abcd\n4:memory:/docker/0123abcd\n0::/\n"
# A group that was made by hand, below one without a limit.
V1_NESTED = {
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": f"{20 * GIB}\n",
    "memory/jobs/quire/memory.limit_in_bytes": f"{GIB}\n",
    "memory/jobs/quire/memory.usage_in_bytes": f"{700 * MIB}\n",
    "memory/jobs/quire/memory.stat": f"total_inactive_file {100 * MIB}\n",
}
V1_NESTED_SELF = "4:memory:/jobs/quire\n0::/\n"
V1_UNLIMITED = {
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/memory.usage_in_bytes": f"{9 * GIB}\n",
}


def reader(tmp_path: Path, files: Mapping[str, str], own: str, limit: int | None = None) -> HostMemoryReader:
    """A machine with 64 GiB, of which 8 are available, and a process that uses 3 MiB."""
    contents = {f"cgroup/{name}": text for name, text in files.items()} | {
        "proc/self/cgroup": own,
        "proc/self/status": "VmRSS:\t 5120 kB\nRssAnon:\t 2048 kB\nRssFile:\t 2048 kB\nRssShmem:\t 1024 kB\n",
        "proc/meminfo": f"MemTotal: {64 * MIB} kB\nMemAvailable:   {8 * MIB} kB\nHugePages_Total:       0\n",
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return HostMemoryReader(limit, tmp_path / "cgroup", tmp_path / "proc")


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        (V2_POD, V2_POD_SELF, HostMemory(3 * GIB - 512 * MIB, 4 * GIB, "cgroup v2")),
        (V2_SLICE, V2_SLICE_SELF, HostMemory(7 * GIB, 8 * GIB, "cgroup v2")),
        (V1_DOCKER, V1_DOCKER_SELF, HostMemory(2 * GIB - MIB - 512 * MIB, 2 * GIB, "cgroup v1")),
        (V1_NESTED, V1_NESTED_SELF, HostMemory(600 * MIB, GIB, "cgroup v1")),
        (V1_CACHED, V1_DOCKER_SELF, HostMemory(700 * MIB, GIB, "cgroup v1")),
        (V1_UNLIMITED, V1_NESTED_SELF, HostMemory(56 * GIB, 64 * GIB, "the machine")),
        ({}, "", HostMemory(56 * GIB, 64 * GIB, "the machine")),
    ],
)
def test_the_limit_is_the_containers_or_else_the_machines(
    files: dict[str, str], own: str, expected: HostMemory, tmp_path: Path
) -> None:
    assert reader(tmp_path, files, own).read() == expected


def test_of_two_limits_that_counts_which_is_nearer_to_be_reached(tmp_path: Path) -> None:
    inner = {"user.slice/quire.service/memory.max": f"{4 * GIB}\n"}  # half of it is used; of the outer one 7/8
    assert reader(tmp_path, V2_SLICE | inner, V2_SLICE_SELF).read().limit == 8 * GIB
    inner = {"user.slice/quire.service/memory.max": f"{2 * GIB + 1}\n"}
    assert reader(tmp_path, V2_SLICE | inner, V2_SLICE_SELF).read().limit == 2 * GIB + 1


def test_with_a_limit_of_the_settings_the_process_alone_counts(tmp_path: Path) -> None:
    own = reader(tmp_path, V2_POD, V2_POD_SELF, limit=4 * MIB)
    assert own.read() == HostMemory(3 * MIB, 4 * MIB, "QUIRE_MEMORY_LIMIT")
    assert own.available() == MIB
    assert reader(tmp_path, V2_POD, V2_POD_SELF, limit=2 * MIB).available() == 0


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "", 8 * GIB),
        (V2_POD, V2_POD_SELF, GIB + 512 * MIB),
        (V2_SLICE, V2_SLICE_SELF, GIB),
        (V1_DOCKER, V1_DOCKER_SELF, 513 * MIB),
        (V1_UNLIMITED, V1_NESTED_SELF, 8 * GIB),
        ({**V2_POD, "memory.max": f"{64 * GIB}\n"}, V2_POD_SELF, 8 * GIB),
        ({**V2_POD, "memory.max": f"{GIB}\n"}, V2_POD_SELF, 0),
    ],
)
def test_available_is_what_both_container_and_machine_have(
    files: dict[str, str], own: str, expected: int, tmp_path: Path
) -> None:
    assert reader(tmp_path, files, own).available() == expected


def test_the_room_ends_at_a_share_of_the_limit(tmp_path: Path) -> None:
    memory = reader(tmp_path, V2_POD, V2_POD_SELF)
    assert memory.room(0.75) == 512 * MIB
    assert memory.room(0.5) == 0


def test_a_group_that_is_gone_counts_no_more(tmp_path: Path) -> None:
    memory = reader(tmp_path, V2_POD, V2_POD_SELF)
    (tmp_path / "cgroup" / "memory.current").unlink()
    assert memory.read().source == "the machine"


def test_this_process_is_read() -> None:
    memory = HostMemoryReader()
    before = memory.read_process()
    taken = bytearray(64 * MIB)
    taken[::4096] = b"x" * len(taken[::4096])
    assert memory.read_process() - before > 56 * MIB
    assert memory.read().used > 0
