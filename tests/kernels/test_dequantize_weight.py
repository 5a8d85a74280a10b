"""The numbers of weights in codes, at odd sizes."""

import pytest
import torch

from quire_kernels.cpu.nibbles import GROUP_SIZES
from quire_kernels.dequantize_weight import dequantize_weight, dequantize_weight_reference
from weight_only_matrices import KINDS, matrix_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (300, 97), (576, 33)])
def test_numbers(kind: str, group: int, inputs: int, outputs: int, device: str) -> None:
    matrix = matrix_of(kind, inputs, outputs, group, device)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        numbers = dequantize_weight(matrix, dtype)
        expected = dequantize_weight_reference(matrix, dtype)
        torch.testing.assert_close(numbers, expected, rtol=tolerance, atol=tolerance)


def test_a_wrong_argument_is_named() -> None:
    matrix = matrix_of("4 bits", 64, 8, 32, "cpu")
    with pytest.raises(ValueError, match=r"^dtype: "):
        dequantize_weight(matrix, torch.float64)
    with pytest.raises(ValueError, match=r"^weight: "):
        dequantize_weight(matrix._replace(inputs=65), torch.float32)
