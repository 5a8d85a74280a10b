"""What tests on a GPU share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Full float32 in torch's own products, as the comparison needs it."""
    torch.backends.cuda.matmul.allow_tf32 = False
