"""How vLLM's CPU build is run beside Quire."""

import os

from worker_svc.host import has_bfloat16


def vllm_environment() -> dict[str, str]:
    """Variables of its process: memory for its cache, and all cores that this process may use.

    By itself vLLM leaves one core to its API server.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}


def vllm_dtype() -> str:
    """The dtype in which it is faster: it calls torch's products, and without instructions for bfloat16 these are
    slower than those of float32.
    """
    return "bfloat16" if has_bfloat16() else "float32"


def vllm_title(name: str) -> str:
    """What a table calls it: with the dtype, where that is not bfloat16, in which Quire computes."""
    dtype = vllm_dtype()
    return f"{name}, CPU build" if dtype == "bfloat16" else f"{name}, CPU build, {dtype}"
