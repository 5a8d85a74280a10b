"""A block of the cache is one piece of memory, in every format."""

import pytest
import torch

from worker_svc.cache import CacheShape

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_takes_its_keys_values_and_scales(dtype: torch.dtype) -> None:
    shape = CacheShape(num_layers=3, num_kv_heads=2, block_size=8, head_dim=16, dtype=dtype)
    vectors = 3 * 2 * 2 * 8
    scale_bytes = 4 if dtype.itemsize == 1 else 0
    assert shape.block_bytes == vectors * (16 * dtype.itemsize + scale_bytes)
    assert shape.allocate(5, CPU).blocks.shape == (5, shape.block_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_copy_a_blocks_bytes_is_to_copy_all_that_layers_see_of_it(dtype: torch.dtype) -> None:
    cache = CacheShape(3, 2, 8, 16, dtype).allocate(5, CPU)
    for layer in range(3):
        views = cache.layer(layer)
        for place, vectors in enumerate((views.keys, views.values)):
            vectors[1] = 2 * layer + place + 1  # which float8 has
        for place, scales in enumerate((views.key_scales, views.value_scales)):
            if scales is not None:
                scales[1] = 100.0 + 10 * layer + place
    cache.blocks[4] = cache.blocks[1]
    for layer in range(3):
        views = cache.layer(layer)
        for place, vectors in enumerate((views.keys, views.values)):
            assert (vectors[4].float() == 2 * layer + place + 1).all()
        for place, scales in enumerate((views.key_scales, views.value_scales)):
            assert (scales is not None) is (dtype.itemsize == 1)
            if scales is not None:
                assert (scales[4] == 100.0 + 10 * layer + place).all()
    assert not cache.blocks[[0, 2, 3]].any()


def test_there_may_be_no_blocks_at_all() -> None:
    shape = CacheShape(1, 1, 8, 16, torch.int8)
    assert shape.allocate_host(0).shape == (0, shape.block_bytes)
