"""A block of the cache is one piece of memory, in every format."""

import pytest
import torch

from worker_svc.cache import CacheShape
from worker_svc.model_layout import KVShape

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_takes_its_keys_values_and_scales(dtype: torch.dtype) -> None:
    shape = CacheShape.of_equal_layers(num_layers=3, num_kv_heads=2, block_size=8, head_dim=16, dtype=dtype)
    vectors = 3 * 2 * 2 * 8
    scale_bytes = 4 if dtype.itemsize == 1 else 0
    assert shape.block_bytes == vectors * (16 * dtype.itemsize + scale_bytes)
    assert shape.allocate(5, CPU).blocks.shape == (5, shape.block_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_copy_a_blocks_bytes_is_to_copy_all_that_layers_see_of_it(dtype: torch.dtype) -> None:
    cache = CacheShape.of_equal_layers(3, 2, 8, 16, dtype).allocate(5, CPU)
    for layer in range(3):
        views = cache.layers[layer]
        for place, vectors in enumerate((views.keys, views.values)):
            vectors[1] = 2 * layer + place + 1  # which float8 has
        for place, scales in enumerate((views.key_scales, views.value_scales)):
            if scales is not None:
                scales[1] = 100.0 + 10 * layer + place
    cache.blocks[4] = cache.blocks[1]
    for layer in range(3):
        views = cache.layers[layer]
        for place, vectors in enumerate((views.keys, views.values)):
            assert (vectors[4].float() == 2 * layer + place + 1).all()
        for place, scales in enumerate((views.key_scales, views.value_scales)):
            assert (scales is not None) is (dtype.itemsize == 1)
            if scales is not None:
                assert (scales[4] == 100.0 + 10 * layer + place).all()
    assert not cache.blocks[[0, 2, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_may_have_shapes_of_their_own(dtype: torch.dtype) -> None:
    shapes = KVShape(2, 16), KVShape(1, 48), KVShape(3, 16)
    cache = CacheShape(shapes, 8, dtype).allocate(5, CPU)
    views = [
        view
        for layer in cache.layers
        for view in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        if view is not None
    ]
    for number, (layer, shape) in enumerate(zip(cache.layers, shapes, strict=True)):
        assert layer.keys.shape == layer.values.shape == (5, shape.num_heads, 8, shape.head_dim)
        # As the operators gather pages of one head
        assert dtype.itemsize == 1 or layer.keys.stride(0) % (8 * shape.head_dim) == 0, number
    for number, view in enumerate(views):
        view[1:4] = number + 1
    for number, view in enumerate(views):
        assert (view[1:4].float() == number + 1).all()
    assert not cache.blocks[[0, 4]].any()


def test_there_may_be_no_blocks_at_all() -> None:
    shape = CacheShape.of_equal_layers(1, 1, 8, 16, torch.int8)
    assert shape.allocate_host(0).shape == (0, shape.block_bytes)
