"""The weighted sum of what a token's experts return."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.combine_experts import combine_experts, combine_experts_reference

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_chosen", "width"), [(1, 1, 1), (3, 2, 48), (5, 8, 1030)])
def test_sums(
    num_tokens: int,
    num_chosen: int,
    width: int,
    dtype: torch.dtype,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_tokens * num_chosen, width).to(device, dtype)
    shared = torch.randn(num_tokens, width + 3).to(device, dtype)[:, :width]
    weights = torch.rand(num_tokens, num_chosen, device=device)
    # As a column of the router's scores
    gate = torch.randn(num_tokens, 7, device=device)[:, 6]
    for more in ((), (shared,), (shared, gate)):
        assert_close(combine_experts(rows, weights, *more), combine_experts_reference(rows, weights, *more))


def test_no_tokens(device: str) -> None:
    rows, weights = torch.empty(0, 8, device=device), torch.empty(0, 2, device=device)
    assert combine_experts(rows, weights).shape == (0, 8)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("rows", lambda t: t.long()),
        ("weights", lambda t: t.half()),
        ("weights", lambda t: t[:2]),
        ("shared", lambda t: t.half()),
        ("shared", lambda t: t[:, :2]),
        ("shared_gate", lambda t: t[:2]),
        ("shared_gate", lambda t: t.half()),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: Callable[[Tensor], Tensor]) -> None:
    arguments = {
        "rows": torch.zeros(6, 4), "weights": torch.zeros(3, 2), "shared": torch.zeros(3, 4),
        "shared_gate": torch.zeros(3),
    }  # fmt: skip
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=f"^{argument}: "):
        combine_experts(**arguments)
