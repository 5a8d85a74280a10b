"""The CPUs, memory and dtypes that this process may use, within the limits of its cgroup."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as a number near 2^63.
_UNLIMITED = 2**60


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Number of CPUs that the process may use."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that the process can allocate without swapping or being killed."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    free = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    # The cgroup counts the page cache as used; the kernel frees it on demand.
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        bound = _number(cgroup / limit)
        if bound is not None and bound < _UNLIMITED:
            taken_bytes = (_number(cgroup / used) or 0) - _stat(cgroup / stat, cache)
            free = min(free, max(0, bound - taken_bytes))
    return free


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has bfloat16 multiplication."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def _cpu_quota(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = (_number(cgroup / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    try:
        words = (line.split() for line in path.read_text().splitlines())
        return next((int(value) for key, value in words if key == name), 0)
    except (OSError, ValueError):
        return 0
