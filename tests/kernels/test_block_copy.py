"""Blocks are copied bit for bit, and no other block changes."""

import pytest
import torch
from torch import Tensor

from quire_kernels.block_copy import block_copy, block_copy_reference


def make_blocks(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Random bits, including NaNs."""
    size = num_blocks * torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(num_blocks, *shape).to(device)


def bits(blocks: Tensor) -> Tensor:
    return blocks.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1, 2, 1, 8, 64), (3, 2, 3, 16, 80), (2, 2, 5, 8, 96)])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_copies_within_a_cache(dtype: torch.dtype, shape: tuple[int, ...], index: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    actual = make_blocks(9, shape, dtype, device)
    expected = actual.clone()
    pairs = torch.tensor([[7, 0], [2, 8], [7, 3]], dtype=index, device=device)
    block_copy(actual, actual, pairs)
    block_copy_reference(expected, expected, pairs)
    assert torch.equal(bits(actual), bits(expected))
    assert torch.equal(bits(actual[0]), bits(actual[7]))


def test_copies_into_another_tensor(device: str) -> None:
    source, destination = (make_blocks(size, (1, 2, 1, 8, 64), torch.float16, device) for size in (9, 4))
    expected = destination.clone()
    pairs = torch.tensor([[8, 3], [0, 1]], device=device)
    block_copy(source, destination, pairs)
    block_copy_reference(source, expected, pairs)
    assert torch.equal(bits(destination), bits(expected))


def test_no_pairs_copy_nothing(device: str) -> None:
    cache = make_blocks(3, (1, 2, 1, 8, 64), torch.float16, device)
    before = cache.clone()
    block_copy(cache, cache, torch.zeros((0, 2), dtype=torch.int64, device=device))
    assert torch.equal(bits(cache), bits(before))


def test_a_wrong_argument_is_named(device: str) -> None:
    cache = torch.zeros((4, 2, 8, 64), device=device)
    pairs = torch.zeros((2, 2), dtype=torch.int64, device=device)
    wrong = {
        "source": [(cache[:, :, ::2], cache, pairs), (cache.flatten()[:4], cache, pairs)],
        "destination": [(cache, cache.half(), pairs), (cache, cache[:, 1:].contiguous(), pairs)],
        "pairs": [(cache, cache, pairs.float()), (cache, cache, pairs[0]), (cache, cache, pairs.T[:, :1].expand(2, 2))],
    }
    for argument, calls in wrong.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"^{argument}: "):
                block_copy(*call)
    odd = torch.zeros((4, 3), device=device)
    with pytest.raises(ValueError, match=r"^source: must have blocks of a multiple of 16 bytes"):
        block_copy(odd, odd, pairs)
