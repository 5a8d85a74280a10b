"""The CPUs and dtypes that this process may use, within the limits of its cgroup."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Number of CPUs that the process may use."""
    cpus = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


_CPUINFO = Path("/proc/cpuinfo")


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU has bfloat16 multiplication."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags(cpuinfo))


def expands_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the compiled kernels multiply bfloat16 as fast as float32, as floats: with AVX2, where there is no
    AVX-512.
    """
    flags = cpu_flags(cpuinfo)
    return {"avx2", "fma"} <= flags and "avx512f" not in flags


def multiplies_bytes(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU has the instructions by which the compiled kernels multiply bytes faster than other numbers."""
    return bool({"avx512_vnni", "avx_vnni"} & cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: Path = _CPUINFO) -> set[str]:
    """The features that Linux names of the CPU; none elsewhere."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


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
