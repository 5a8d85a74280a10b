"""Sums that several programs share: how many they are, and that a launch leaves nothing behind for the next one."""

import pytest
import torch

from quire_kernels._split_sums import arrivals, choose_splits
from quire_kernels.weight_only_linear import weight_only_linear, weight_only_linear_reference
from weight_only_matrices import KINDS, matrix_of


@pytest.mark.parametrize(
    ("num_tiles", "num_blocks", "splits"),
    [
        (132, 16, 1),  # enough programs without
        (64, 16, 8),
        (64, 8, 4),  # two blocks for each at least
        (64, 3, 1),
        (1, 1000, 16),
    ],
)
def test_few_tiles_of_many_inputs_are_shared(num_tiles: int, num_blocks: int, splits: int) -> None:
    assert choose_splits(num_tiles, num_blocks, 132) == splits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [2048, 2100])
def test_launches_with_other_numbers_of_programs_follow_each_other(kind: str, inputs: int, device: str) -> None:
    few, many = (matrix_of(kind, width, 40, 32, device) for width in (1100, inputs))
    for matrix in (many, few, many):
        for rows in (1, 17):
            values = torch.randn(rows, matrix.inputs).to(device, torch.float16)
            product = weight_only_linear(values, matrix)
            expected = weight_only_linear_reference(values, matrix)
            torch.testing.assert_close(product, expected, rtol=1e-2, atol=0.3)
    assert not arrivals(product.device).any()
