"""Products of rows with the weights of their experts, ragged; the bits of a row do not depend on other rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ordered_dots import order_dots
from quire_kernels.activation import Activation
from quire_kernels.group_by_expert import group_by_expert, group_by_expert_reference
from quire_kernels.grouped_linear import choose_tile_rows, grouped_linear, grouped_linear_reference

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
NUM_EXPERTS = 5


def _random(rows: int, inputs: int, outputs: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    values, weight = torch.randn(rows, inputs), torch.randn(NUM_EXPERTS, outputs, inputs) / inputs**0.5
    return values.to(device, dtype), weight.to(device, dtype)


def _ragged(num_tokens: int, device: str) -> Tensor:
    """Two experts of each token: expert 3 has every token, expert 0 none, expert 4 one."""
    others = [4] + [1 + token % 2 for token in range(num_tokens - 1)]
    return torch.tensor([[3, other] for other in others], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(1, 15, 34), (17, 65, 34), (35, 48, 130)])
def test_products(
    num_tokens: int,
    inputs: int,
    outputs: int,
    activation: Activation | None,
    dtype: torch.dtype,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    values, weight = _random(num_tokens, inputs, outputs, device, dtype)
    experts = _ragged(num_tokens, device)
    bias = torch.randn(NUM_EXPERTS, outputs).to(device, dtype)
    for tile_rows, added in ((16, None), (16, bias), (64, bias)):
        groups = group_by_expert(experts, NUM_EXPERTS, tile_rows)
        arguments = values, weight, groups, experts.numel(), activation, added
        assert_close(grouped_linear(*arguments), grouped_linear_reference(*arguments))


def test_each_row_may_have_an_input_of_its_own(device: str) -> None:
    experts = _ragged(9, device)
    values, weight = _random(18, 48, 33, device, torch.float32)
    bias = torch.randn(NUM_EXPERTS, 33, device=device)
    product = grouped_linear(values, weight, group_by_expert(experts, NUM_EXPERTS, 16), 18, bias=bias)
    of_rows = zip(experts.flatten().tolist(), values, strict=True)
    expected = torch.stack([weight[expert] @ row + bias[expert] for expert, row in of_rows])
    assert torch.allclose(product, expected, atol=1e-4)


def test_the_weights_of_other_experts_are_not_read(device: str) -> None:
    """A product with them would be NaN, and so would a mask that multiplies it."""
    experts = torch.tensor([[1, 3]] * 20, dtype=torch.int32, device=device)
    values, weight = _random(20, 48, 34, device, torch.float32)
    groups = group_by_expert(experts, NUM_EXPERTS, 16)
    expected = grouped_linear(values, weight, groups, 40)
    weight[[0, 2, 4]] = float("nan")
    assert torch.equal(grouped_linear(values, weight, groups, 40), expected)
    # Two tiles for each of two experts: none for others
    assert sorted(groups.tile_experts.tolist()) == [-1] * (len(groups.tile_experts) - 4) + [1, 1, 3, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_comes_to_the_same_bits_however_many_there_are(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_dots(monkeypatch)
    values, weight = _random(70, 65, 34, device, dtype)
    experts = _ragged(70, device)

    def product(tokens: slice) -> Tensor:
        chosen = experts[tokens].contiguous()
        tile_rows = choose_tile_rows(chosen.numel(), NUM_EXPERTS, dtype, deterministic=True)
        groups = group_by_expert(chosen, NUM_EXPERTS, tile_rows)
        rows = grouped_linear(values[tokens], weight, groups, chosen.numel(), Activation.SILU)
        return rows.view(len(chosen), 2, -1)

    together = product(slice(None))
    for first, end in ((0, 1), (5, 6), (3, 19), (1, 66)):
        assert torch.equal(product(slice(first, end)), together[first:end])


def test_tiles_are_as_large_as_experts_have_rows() -> None:
    def sizes(dtype: torch.dtype, *, deterministic: bool) -> list[int]:
        return [choose_tile_rows(n, 8, dtype, deterministic=deterministic) for n in (2, 128, 129, 4096)]

    assert sizes(torch.bfloat16, deterministic=False) == [16, 16, 64, 64]
    assert sizes(torch.bfloat16, deterministic=True) == [64] * 4
    assert sizes(torch.float32, deterministic=False) == [32] * 4


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("inputs", {"inputs": torch.zeros(6)}),
        ("weight", {"weight": torch.zeros(NUM_EXPERTS, 4, 8).half()}),
        ("weight", {"weight": torch.zeros(NUM_EXPERTS, 4, 7)}),
        ("weight", {"weight": torch.zeros(NUM_EXPERTS, 3, 8), "activation": Activation.SILU}),
        ("groups", {"groups": group_by_expert_reference(torch.zeros(6, 1, dtype=torch.int32), NUM_EXPERTS, 8)}),
        ("num_rows", {"num_rows": 7}),
        ("bias", {"bias": torch.zeros(4)}),
        ("bias", {"bias": torch.zeros(NUM_EXPERTS, 4).half()}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "inputs": torch.zeros(6, 8),
        "weight": torch.zeros(NUM_EXPERTS, 4, 8),
        "groups": group_by_expert_reference(torch.zeros(6, 1, dtype=torch.int32), NUM_EXPERTS, 16),
        "num_rows": 6,
    } | change
    with pytest.raises(ValueError, match=f"^{argument}: "):
        grouped_linear(**arguments)  # type: ignore[arg-type]
