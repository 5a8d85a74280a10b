"""The experts of each token and their weights, at odd numbers of experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.choose_experts import Groups, choose_experts, choose_experts_reference


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(1, 1, 1), (5, 4, 2), (3, 60, 4), (7, 128, 8), (2, 65, 65)]
)
def test_choices(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    normalized: bool,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    # One more column is the gate of a shared MLP.
    scores = torch.randn(num_tokens, num_experts + 1, device=device) * 3
    chosen = choose_experts(scores, num_experts, num_chosen, normalized=normalized, scale=2.5)
    expected = choose_experts_reference(scores, num_experts, num_chosen, normalized=normalized, scale=2.5)
    assert torch.equal(chosen.experts, expected.experts)
    assert_close(chosen.weights, expected.weights)
    if normalized:
        assert_close(chosen.weights.sum(-1), torch.full((num_tokens,), 2.5, device=device))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "groups"),
    [
        (8, 3, None),
        (8, 3, Groups(4, 2, 1)),
        (8, 3, Groups(4, 2, 2)),
        (160, 6, Groups(8, 3, 1)),
        (256, 8, Groups(8, 4, 2)),
        (15, 10, Groups(3, 2, 5)),
        (6, 2, Groups(6, 2, 1)),
    ],
)
def test_choices_of_deepseek(
    num_experts: int,
    num_chosen: int,
    groups: Groups | None,
    biased: bool,
    sigmoid: bool,
    device: str,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    scores = torch.randn(9, num_experts, device=device) * 3
    bias = torch.randn(num_experts, device=device) if biased else None
    options: dict[str, Any] = {"normalized": sigmoid, "scale": 2.5, "sigmoid": sigmoid, "bias": bias, "groups": groups}
    chosen = choose_experts(scores, num_experts, num_chosen, **options)
    expected = choose_experts_reference(scores, num_experts, num_chosen, **options)
    assert torch.equal(chosen.experts, expected.experts)
    assert_close(chosen.weights, expected.weights)


def test_bias_and_groups_change_choices_and_not_weights(device: str) -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0]], device=device)
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0], device=device)
    for changes, experts in (
        ({}, [0, 2]),
        ({"groups": Groups(2, 1, 1)}, [0, 1]),
        ({"groups": Groups(2, 1, 2)}, [0, 1]),
        ({"bias": bias}, [1, 0]),
    ):
        options: dict[str, Any] = changes
        chosen = choose_experts(scores, 4, 2, normalized=False, **options)
        assert chosen.experts.tolist() == [experts]
        assert torch.allclose(chosen.weights, scores.softmax(-1)[:, experts])


def test_of_equal_scores_the_lower_numbers_are_chosen(device: str) -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0], [0.0] * 5], device=device)
    assert choose_experts(scores, 5, 3, normalized=True).experts.tolist() == [[1, 2, 0], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_scores_that_are_not_numbers_choose_experts_that_exist(device: str) -> None:
    scores = torch.full((1, 6), float("nan"), device=device)
    chosen = choose_experts(scores, 6, 2, normalized=True)
    assert bool(((chosen.experts >= 0) & (chosen.experts < 6)).all())
    assert bool(chosen.weights.isnan().all())


def test_large_scores_do_not_overflow(device: str) -> None:
    scores = torch.tensor([[-1e38, 2e38, 1e38]], device=device)
    chosen = choose_experts(scores, 3, 2, normalized=False)
    assert (chosen.experts.tolist(), chosen.weights.tolist()) == ([[1, 2]], [[1.0, 0.0]])


def test_no_tokens(device: str) -> None:
    assert choose_experts(torch.empty(0, 4, device=device), 4, 2, normalized=True).experts.shape == (0, 2)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("scores", {"scores": torch.zeros(2, 4).half()}),
        ("num_experts", {"num_experts": 5}),
        ("num_experts", {"num_experts": 0}),
        ("num_chosen", {"num_chosen": 5}),
        ("num_chosen", {"num_chosen": 0}),
        ("num_chosen", {"groups": Groups(4, 1, 1)}),
        ("groups", {"groups": Groups(3, 1, 1)}),
        ("groups", {"groups": Groups(2, 3, 1)}),
        ("groups", {"groups": Groups(2, 1, 3)}),
        ("bias", {"bias": torch.zeros(5)}),
    ],
)
def test_a_wrong_argument_is_named(argument: str, change: dict[str, object]) -> None:
    arguments: dict[str, object] = {"scores": torch.zeros(2, 4), "num_experts": 4, "num_chosen": 2} | change
    with pytest.raises(ValueError, match=f"^{argument}: "):
        choose_experts(**arguments, normalized=True)  # type: ignore[arg-type]
