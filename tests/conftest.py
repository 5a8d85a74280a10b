"""Set before any test's module is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
