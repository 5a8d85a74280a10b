"""Fixtures of the kernels' tests: the device, and batches over a poisoned cache."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import paged_batches
from paged_batches import Batch


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: these tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def make_batch(device: str) -> Callable[..., Batch]:
    return partial(paged_batches.make_batch, device=device)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    return paged_batches.assert_close
