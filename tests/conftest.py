"""Set before any test's module is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

# An example may take as long as it likes: a busy machine is no fault of what is tested.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")
