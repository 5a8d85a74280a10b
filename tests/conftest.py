"""Set before any test's module is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os
from contextlib import suppress

import torch

from environments import shared_processors

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

# More threads than processors wait for each other at every parallel loop.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    torch.set_num_threads(shared_processors())

# `make gpu-check` does without it.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # An example may take as long as it likes: a busy machine is no fault of what is tested.
    settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("quire")
