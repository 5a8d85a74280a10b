"""Set before any test's module is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from environments import shared_processors

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module, or Triton, is imported
    from quick_interpreter import quicken

    quicken()

# A shell starts what runs in the background with SIGINT ignored, and Python and what it starts leave it so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# More threads than processors wait for each other at every parallel loop.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    torch.set_num_threads(shared_processors())

# `make gpu-check` does without it.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # An example may take as long as it likes: a busy machine is no fault of what is tested.
    settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("quire")


@pytest.fixture(scope="module")
def shallow_model() -> Iterator[Path]:
    """Directory of the default model with a fifth of its layers, which is the default one of a module's deployments."""
    from shallow_model import shallow_default_model  # `make gpu-check` lacks what it imports

    with shallow_default_model() as directory:
        yield directory
