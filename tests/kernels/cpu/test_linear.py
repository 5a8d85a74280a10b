"""Products of every size against float64, and weights in 8 bits."""

import pytest
import torch

import compiled
from quire_kernels.cpu.linear import linear, pack_matrix

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rows", [0, 1, 2, 13, 14, 15, 29, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (48, 97), (49, 31), (576, 960), (1536, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)
    x = torch.randn(rows, inputs).to(dtype)
    product = linear(compiled.thread_pool(), x, pack_matrix(compiled.thread_pool(), weight, bias))
    torch.testing.assert_close(product.double(), x.double() @ weight.double().t() + bias, rtol=1e-4, atol=1e-4)
    alone = linear(compiled.thread_pool(), x[-1:], pack_matrix(compiled.thread_pool(), weight, bias))
    assert torch.equal(alone, product[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_weights_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 576).to(dtype)
    weight[3] = 0
    identity = torch.eye(576, dtype=dtype)
    restored = linear(compiled.thread_pool(), identity, pack_matrix(compiled.thread_pool(), weight, int8=True)).t()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert bool(((restored - weight.float()).abs() <= step * 0.501).all())


def test_weights_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype"):
        pack_matrix(compiled.thread_pool(), torch.zeros(2, 2, dtype=torch.float16))
