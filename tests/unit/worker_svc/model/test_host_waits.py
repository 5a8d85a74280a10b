"""What makes the host wait for a device is found, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from worker_svc.model.host_waits import first_host_wait

NUMBERS = torch.arange(6.0)
ROWS = torch.tensor([4, 0])
MASK = NUMBERS > 2


def _assign_by_mask(numbers: Tensor) -> None:
    numbers[MASK] = torch.ones(3)


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda: NUMBERS.sum().item(), "aten::_local_scalar_dense"),
        (lambda: 1 if NUMBERS.sum() > 3 else 0, "aten::_local_scalar_dense"),
        (lambda: NUMBERS.nonzero(), "aten::nonzero"),
        (lambda: NUMBERS[MASK], "aten::index"),
        (lambda: _assign_by_mask(NUMBERS.clone()), "aten::index_put_"),
        (lambda: torch.unique(ROWS), "aten::_unique2"),
        (lambda: (NUMBERS[ROWS], ROWS.nonzero(), NUMBERS.sum().item()), "aten::nonzero"),
    ],
)
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_the_first_operation_that_waits_is_named(
    context: Callable[[], torch.no_grad], work: Callable[[], object], name: str
) -> None:
    with context():
        assert first_host_wait(work) == name


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_what_does_not_wait_is_not_named(context: Callable[[], torch.no_grad]) -> None:
    def work() -> None:
        numbers = NUMBERS[ROWS] * 2
        numbers[torch.tensor([0])] = 5.0
        torch.where(MASK, NUMBERS, 0.0).masked_fill_(MASK, 1.0).to(torch.bfloat16)
        torch.nn.functional.linear(numbers[None], torch.ones(3, 2)).softmax(-1).topk(2)
        NUMBERS.view(2, 3)[:, 1:].transpose(0, 1).contiguous().copy_(torch.zeros(2, 2))

    with context():
        assert first_host_wait(work) is None


def test_the_result_is_computed_once() -> None:
    counts = torch.zeros(1)
    assert first_host_wait(lambda: counts.add_(1)) is None
    assert counts.tolist() == [1]
