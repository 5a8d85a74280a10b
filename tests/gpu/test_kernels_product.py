"""Attention on a GPU: every combination of shapes against the references."""

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from kernel_product import Case, all_extras, all_shapes, checking

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[Case, Future[None]]]:
    with checking([*all_shapes(), *all_extras()]) as futures:
        yield futures


@pytest.mark.parametrize("case", all_shapes(), ids=str)
def test_every_shape(checks: dict[Case, Future[None]], case: Case) -> None:
    checks[case].result()


@pytest.mark.parametrize("case", all_extras(), ids=str)
def test_quantized_caches_windows_and_caps(checks: dict[Case, Future[None]], case: Case) -> None:
    checks[case].result()
