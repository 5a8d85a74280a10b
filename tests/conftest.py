"""Set before any test's module is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os
from contextlib import suppress

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

# Test processes share the processors. More threads than processors wait for each other at every parallel loop.
if num_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))

# `make gpu-check` does without it.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # An example may take as long as it likes: a busy machine is no fault of what is tested.
    settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("quire")
