"""Fixtures of the tests on a GPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Full float32 precision in torch's products, for the comparison."""
    torch.backends.cuda.matmul.allow_tf32 = False
