"""Attention on a GPU: every combination of shapes against the references. `make gpu-check` distributes them over
processes."""

import pytest
import torch

from kernel_product import Case, all_extras, all_shapes, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("case", all_shapes(), ids=str)
def test_every_shape(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", all_extras(), ids=str)
def test_quantized_caches_windows_and_caps(case: Case) -> None:
    check(case)
